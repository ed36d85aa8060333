"""The compiled libraries: where they lie, whether they were built from these sources, and opening them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[1]


def opened(name: str) -> str | None:
    """Opens library ``_<name>``, ``"cpu"`` or ``"cuda"``; the reason if there is none or it does not load."""
    library = next(iter(sorted(_PACKAGE.glob(f"_{name}*.so"))), None)
    file = _PACKAGE / "_build.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    if library is None:
        kind = "C++" if name == "cpu" else "CUDA"
        otherwise = f"the {kind} library was not built; `pip install --no-build-isolation .` builds it"
        return record.get("not_built", {}).get(name, otherwise)
    sources = _PACKAGE.parent / "csrc" / "ops.h"  # of a checkout that the library was built in
    if sources.exists() and record.get("declarations") != hashlib.sha256(sources.read_bytes()).hexdigest():
        known = "was built from another csrc/ops.h" if "declarations" in record else "has no record of its build"
        return f"{library.name} {known}; `make install` builds it anew"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name} does not load: {error}"
    return None
