"""The layers and stages of the C++ libraries as functions that Python calls in C++: ``csrc/python``.

They do what ``wnfused.ops._direct`` does by the ops of ``native`` and ``native_autograd``, in less time on the way. The
library fits one version of torch and one of Python. It has the ops of ``torch.ops.wnfused`` on CPU tensors, too; once
it is open, they take the place of Python's (``wnfused.ops._registration``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from wnfused.backends import native_autograd
from wnfused.backends.library import opened


@functools.cache
def unavailable() -> str | None:
    """Opens the library; the reason if there is none or it does not load."""
    return native_autograd.unavailable() or opened("python")


@functools.cache
def layer(name: str) -> Callable[..., Any] | None:
    """The function that gives y of ``x, v, g, bias, residual`` (a stage has none), a kept convolution's banks, and the
    constants, or None where the call is watched or not of the kernels' dtypes; None if the library, or the function in
    it, is not there."""
    if unavailable() is not None:
        return None
    function: Callable[..., Any] | None = getattr(importlib.import_module("wnfused._python"), name, None)
    return function
