"""Results by the hash of everything they depend on, so that only what changed is compiled again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from gate.rows import Entry
from gate.tools import version

FOLDER = Path(__file__).parents[1] / "build" / "gate"


def key(*parts: str | bytes) -> str:
    """One digest of all parts, and of what disassembles and how that is read."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    reading = (*((here / name).read_bytes() for name in ("sass.py", "rows.py")), version("nvdisasm"))
    for part in (*parts, *reading):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def remembered(digest: str, compute: Callable[[], list[Entry]]) -> list[Entry]:
    """The entries stored under a digest, or computed and stored. A failure to compile is not stored."""
    path = FOLDER / f"{digest}.json"
    if path.exists():
        return [Entry(**stored) for stored in json.loads(path.read_text())]
    found = compute()
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Another process may be at the same row: the file appears whole or not at all.
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps([dataclasses.asdict(entry) for entry in found]))
    draft.replace(path)
    return found
