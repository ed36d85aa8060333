"""The opt-in search: ``WNFUSED_TRITON_SEARCH=file.json`` times every configuration of the table once for each kind of
launch: shapes, strides and dtypes of its operands, which of them there are, and its constants.

What was found is saved in the file and read from it ever after, so that runs with the same file give the same bits;
without the variable nothing is timed. Delete the file to search again. Nothing is timed while a CUDA graph is being
captured, either: what was not found before then runs by the table.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import uuid
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch

_lock = threading.Lock()
"""A backward has a thread to each device: they time, which would disturb the others', and write one after another."""


@functools.cache
def path() -> Path | None:
    """The file, or None where no search is asked for."""
    named = os.environ.get("WNFUSED_TRITON_SEARCH")
    return Path(named) if named else None


@functools.cache
def _found() -> dict[str, str]:
    file = path()
    if file is None or not file.exists():
        return {}
    found: dict[str, str] = json.loads(file.read_text())
    return found


def best(name: str, device: torch.device, candidates: Sequence[Any], launch: Callable[[Any], Any]) -> Any:
    """The fastest of some configurations for one kind of launch on one kind of device; None where it is not known and
    a stream that is being captured leaves nothing to time."""
    key = f"{torch.cuda.get_device_name(device)}: {name}"
    by_name = {str(candidate): candidate for candidate in candidates}
    with _lock:
        if _found().get(key) not in by_name:  # never searched, or searched among other configurations
            with torch.cuda.device(device):  # whose stream is asked and timed
                if torch.cuda.is_current_stream_capturing():
                    return None
                times = {text: _milliseconds(launch, candidate) for text, candidate in by_name.items()}
            _save(key, min(times, key=times.__getitem__), by_name)
        return by_name[_found()[key]]


def _milliseconds(launch: Callable[[Any], Any], candidate: Any) -> float:
    from triton.testing import do_bench

    median: float = do_bench(lambda: launch(candidate), return_mode="median")
    return median


def _save(key: str, choice: str, candidates: Container[str]) -> None:
    file = path()
    assert file is not None
    # What another process found meanwhile stands, so that all run the same.
    known = json.loads(file.read_text()) if file.exists() else {}
    _found().update({**known, key: known[key] if known.get(key) in candidates else choice})
    file.parent.mkdir(parents=True, exist_ok=True)
    # Of a name that no process has, on whichever machine: the file appears whole or not at all.
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    draft.write_text(json.dumps(_found(), indent=1, sort_keys=True))
    draft.replace(file)
