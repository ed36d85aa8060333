"""The one place that chooses a backend.

Every op of ``torch.ops.wnfused`` lands here with its arguments, or, from C++, asks ``prefers_native``. A backend is a
module that has a function of the op's name and answers ``refusal(op, arguments)`` with ``None`` or the reason why it
cannot run them. On each device the backends are asked in the order of ``order``; ``use_backend`` or ``WNFUSED_BACKEND``
names one instead, and then nothing else will do.

Three gates before it answer early what it would: ``wnfused.ops._direct`` and ``csrc/python/calls.cpp`` for plain eager
calls of layers and stages, ``csrc/python/ops.cpp`` for compiled graphs. Where one of them takes a call, the choice here
would be the same kernel (``tests/test_native_entry.py``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from wnfused.backends import tensors_of

BACKENDS = ("native", "triton", "reference")


def order(op: str, device: str) -> tuple[str, ...]:
    """Which backends an automatic choice asks, by op and device type; any other device runs the reference."""
    if device == "cpu":
        return ("native", "reference")
    if device == "cuda":  # single layers are Triton's where they do not go past Python: see ``prefers_native_on_cuda``
        single = op.removesuffix("_backward") in ("linear", "conv", "weight_norm_many")
        return ("triton", "reference") if single else ("native", "triton", "reference")
    return ("reference",)


class BackendUnavailableError(RuntimeError):
    """The backend that was asked for by name cannot run the op on these arguments."""


class BackendWarning(UserWarning):
    """An automatic choice passed over a faster backend. Given once for each op and reason."""


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {name!r}; one of {', '.join(map(repr, BACKENDS))} is right")
    return name


_AS_ENVIRONMENT = "as WNFUSED_BACKEND says"
_requested: ContextVar[str | None] = ContextVar("wnfused_backend", default=_AS_ENVIRONMENT)
_warned: set[tuple[str, str, str]] = set()


@functools.cache
def _from_environment() -> str | None:
    name = os.environ.get("WNFUSED_BACKEND")
    return _checked(name, "WNFUSED_BACKEND") if name else None


@functools.cache
def backend_module(name: str) -> ModuleType:
    """The module behind a backend's name, imported when first asked for."""
    return importlib.import_module(f"wnfused.backends.{name}")


def requested() -> str | None:
    """The backend named by ``use_backend`` or ``WNFUSED_BACKEND``, or None where the choice is automatic."""
    name = _requested.get()
    return _from_environment() if name == _AS_ENVIRONMENT else name


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within this context every op runs on the named backend; so does the backward of what ran here, wherever it runs.

    As with ``torch.no_grad``, the context holds for the thread (and the asynchronous task) that enters it; other
    threads go by ``WNFUSED_BACKEND``, which holds for the whole process. What ``torch.compile`` made goes by the
    context that it is called in, its backward on a CPU by the one that the backward is called in, and on a GPU, where
    torch runs it in a thread of its own, by ``WNFUSED_BACKEND`` or the automatic choice; a function that is compiled
    with ``fullgraph=True`` cannot enter one itself.

    Args:
        name: ``"native"`` (C++), ``"triton"`` or ``"reference"`` (plain torch); None for the automatic choice, also
            where ``WNFUSED_BACKEND`` names one.

    Raises:
        ValueError: the name is none of these.
        BackendUnavailableError: on the first op that the backend cannot run, with the reason.
    """
    token = _requested.set(None if name is None else _checked(name, "use_backend"))
    try:
        yield
    finally:
        _requested.reset(token)


def backend_status() -> dict[str, str | None]:
    """Each backend's name with None where it is available, or the reason why it is not."""
    return {name: backend_module(name).unavailable() for name in BACKENDS}


def device_type(arguments: Sequence[Any]) -> str:
    """That of the first tensor: an op's tensors are on one device."""
    return next((t.device.type for t in tensors_of(arguments)), "cpu")


def select(op: str, arguments: Sequence[Any]) -> Callable[..., Any]:
    """The kernel that will run ``op`` on these arguments."""
    name = requested()
    if name is not None:
        backend = backend_module(name)
        reason = backend.refusal(op, arguments)
        if reason is not None:
            raise BackendUnavailableError(f"{op} cannot run on backend {name!r}: {reason}")
        return getattr(backend, op)
    for name in order(op, device_type(arguments)):
        backend = backend_module(name)
        reason = backend.refusal(op, arguments)
        if reason is None:
            return getattr(backend, op)
        _warn_once(op, name, reason)
    raise AssertionError("the reference refuses nothing")


def pass_over(function: str, backend: str, reason: str) -> None:
    """For functions that are no ops, and calls that go past them: ``backend`` should run this one and cannot. Announces
    it, as ``select`` does.

    Raises:
        BackendUnavailableError: the backend was asked for by name.
    """
    if requested() == backend:
        raise BackendUnavailableError(f"{function} cannot run on backend {backend!r}: {reason}")
    _warn_once(function, backend, reason)


def prefers_native() -> bool:
    """Whether a call on CPU tensors goes to the native backend, unless that has no kernel for it."""
    name = requested()
    chosen = name in (None, "native")  # an automatic choice asks it first
    return chosen and backend_module("native").unavailable() is None


def prefers_native_on_cuda() -> bool:
    """Whether a plain eager call on a CUDA tensor, of a single layer or a stage, goes to the C++ libraries if they take
    it, past Python: the whole stage, or the vendor's product with our kernels beside it. Any other call goes by
    ``order``."""
    return requested() in (None, "native")


def _warn_once(op: str, backend: str, reason: str) -> None:
    if (op, backend, reason) not in _warned:
        _warned.add((op, backend, reason))
        message = f"{op} passes over backend {backend!r}: {reason}"
        warnings.warn(message, BackendWarning, stacklevel=_level_of_the_caller())


def _level_of_the_caller() -> int:
    """The stack level, seen from who warns, of the first frame outside this package and what runs models for others:
    the user's line."""
    runners = ("wnfused", "torch", "lightning", "pytorch_lightning")
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in runners:
        frame, level = frame.f_back, level + 1
    return level
