"""Peak memory of a run.

On a GPU: the caching allocator's ``max_memory_allocated``. On a CPU: the peak of the *resident* memory of this
process (Linux: ``VmHWM``), interpreter and libraries included. The kernel's peak counts from the start of the
process; writing 5 to ``/proc/self/clear_refs`` makes it count from now, so that runs of one process can be told
apart. Where that is not possible the peak is that of the process so far (``getrusage``).

``baseline_bytes`` is what was resident when the run began: ``peak - baseline`` is what the run itself added. Freed
memory that the C library kept from an earlier run would hide in the baseline; it is given back first.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_SELF = Path("/proc/self")


class PeakMemory:
    """Begins to watch when made; ``peak_bytes()`` may be asked any number of times."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.baseline_bytes = torch.cuda.memory_allocated(self.device)
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            (_SELF / "clear_refs").write_text("5")
        self.baseline_bytes = _status("VmRSS") or _process_peak()

    def peak_bytes(self) -> int:
        """The peak since this object was made, in bytes."""
        if self.device is not None:
            return torch.cuda.max_memory_allocated(self.device)
        return _status("VmHWM") or _process_peak()


def _status(field: str) -> int:
    """One entry of ``/proc/self/status`` in bytes, 0 where there is none."""
    with suppress(OSError):
        for line in (_SELF / "status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _process_peak() -> int:
    """The peak since the process began; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
