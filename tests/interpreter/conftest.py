"""Tests of the Triton kernels themselves: on a GPU where there is one, else in Triton's interpreter.

The interpreter is chosen before triton is imported and for a whole process, so without a GPU these files are left out
of an ordinary run; ``tests/test_triton.py`` runs each of them in a process with TRITON_INTERPRET=1, and
``bench/gpu.py`` runs them on a GPU.
"""

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _as_in_the_interpreter():
    """float32 means float32; where torch's own kernels on a GPU cannot be deterministic, they need not be."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    if torch.cuda.is_available():  # unwritten memory is filled with NaN all the same
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    for flag, allowed in zip(flags, before, strict=True):
        flag.allow_tf32 = allowed
