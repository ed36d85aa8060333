"""Folders to write into, and writing files so that a reader, or a crash at any moment, sees the old content or the new,
never a part."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from wnfused.train.errors import UsageError


def make_folder(folder: Path, file: Path | None = None) -> None:
    """Make sure that a folder exists and can be written: ``--out`` itself, or that of the file ``--out``.

    Raises:
        UsageError: if not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        right = "is a file; name a folder" if file is None else f"cannot be written: {folder} is a file"
        raise UsageError("out", file or folder, right) from None
    except (OSError, ValueError) as error:
        raise UsageError("out", file or folder, f"cannot be written: {reason(error)}") from None


def reason(error: Exception) -> str:
    """What went wrong, in the system's words."""
    return str(error.strerror) if isinstance(error, OSError) else str(error)


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path``, force it to the disk, and rename it over ``path``.

    Raises:
        OSError: as the file system reports it (full, read-only ...); what was at ``path`` is still there.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # writing knows no names
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_folder(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """``write_atomically`` of indented, standard JSON: NaN and infinities are an error, not an extension."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def remove_leftovers(*paths: Path) -> None:
    """Delete the temporary files of a process that was killed while it wrote to one of ``paths``."""
    for path in paths:
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}.tmp"):  # as ``mkstemp`` names them
            leftover.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, which can be read only by setting it. ``mkstemp`` ignores it and gives 0600."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
