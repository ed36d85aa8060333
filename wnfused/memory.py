"""Memory that is kept between calls."""

from __future__ import annotations

import torch

from wnfused.backends import native


def empty_cache() -> None:
    """Gives back the CPU memory that the C++ kernels keep for the next call.

    Fresh memory costs more than arithmetic: a training step of deep stages that had to fetch its saved maps and
    gradients from the system anew would be up to a third slower. So large ones are kept when they are freed, in all at
    most a quarter of the memory that the process may use (or 1 GB, where that is more). What is in use stays in use. On
    CUDA devices ``torch.cuda.empty_cache`` does the same for torch's own allocator, whose memory this package takes
    there.
    """
    if native.unavailable() is None:
        torch.ops.wnfused_native.release_cpu_memory()
