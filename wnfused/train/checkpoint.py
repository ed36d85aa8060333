"""Checkpoint files that are whole or refused.

A file is what ``torch.save`` writes, followed by a line with the SHA-256 digest of all that precedes it. It is
written beside its final name, forced to the disk and renamed, so that a crash leaves the old file. Tensors and plain
Python types only: it is read with ``weights_only=True``, and a file from elsewhere cannot run code.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from wnfused.train.errors import KeepsMessage
from wnfused.train.files import write_atomically

_MARK = b"\nwnfused sha256 "
_TRAILER = len(_MARK) + 64


class CorruptCheckpointError(KeepsMessage, RuntimeError):
    """The file is truncated, was changed, or is no checkpoint of this package. Nothing was loaded."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        begins = Path(path).name == "last.ckpt" and Path(path).with_name("config.json").exists()
        files = "it and best.ckpt" if Path(path).with_name("best.ckpt").exists() else "it"
        right = f" Delete {files} to begin that run again" if begins else ""
        super().__init__(f"checkpoint {path}: {reason}; nothing was changed.{right}")


def save(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``, atomically.

    Raises:
        OSError: as the file system reports it; what was at ``path`` is still there.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getvalue()
    write_atomically(Path(path), payload + _MARK + hashlib.sha256(payload).hexdigest().encode())


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``save`` wrote.

    Raises:
        CorruptCheckpointError: if the digest is missing or does not match.
        OSError: if the file cannot be read.
    """
    content = Path(path).read_bytes()
    payload, trailer = content[:-_TRAILER], content[-_TRAILER:]
    if not trailer.startswith(_MARK):
        raise CorruptCheckpointError(path, "is truncated or not a checkpoint of wnfused")
    if trailer != _MARK + hashlib.sha256(payload).hexdigest().encode():
        raise CorruptCheckpointError(path, "does not match its SHA-256 digest")
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
