"""What functions ask of plain numbers, flags and the like; an error names the argument, its value and what is right."""

from __future__ import annotations

import math
import operator
import os
import sys
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What a layer's parameters can be in."""


def positive(**values: int) -> None:
    """Each an int of at least 1 that fits into torch's 64 bits."""
    _ints(1, values)


def counts(**values: int) -> tuple[int, ...]:
    """Integers of any kind, each at least 1, as Python's own."""
    plain = {name: plain_int(value) for name, value in values.items()}
    positive(**plain)
    return tuple(plain.values())


def from_0(**values: int) -> None:
    """Each an int of at least 0 that fits into torch's 64 bits."""
    _ints(0, values)


def _ints(least: int, values: dict[str, int]) -> None:
    for name, given in values.items():
        value = plain_int(given)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: {value!r} must be an int of at least {least}")
        if value >= 2**63:
            raise ValueError(f"{name}: {value} must be below 2**63")


def plain_int(value: Any) -> Any:
    """Python's own int of an integer of another kind (numpy's, a tensor's of one number); anything else as it is."""
    # Of a list, index raises; the compiler of torch 2.11 does not catch it.
    if isinstance(value, (int, torch.SymInt, tuple, list)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def plain_number(value: Any) -> Any:
    """``plain_int``, and Python's own number, string or truth value of one of numpy's."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else plain_int(value)


def flag(**values: bool) -> None:
    """Each True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} must be True or False")


def truth(**values: bool | None) -> None:
    """Each True or False, or 1, 0 or None, which torch takes for them."""
    for name, value in values.items():
        try:
            fits = value in (0, 1, None)
        except (RuntimeError, ValueError):  # a tensor or an array of several numbers
            fits = False
        if not fits:
            raise TypeError(f"{name}: {value!r} must be True or False")


def floating_dtype(**values: torch.dtype | None) -> None:
    """Each a dtype that the ops run in, or None for torch's default."""
    for name, value in values.items():
        if value is not None and value not in DTYPES:
            raise TypeError(f"{name}: {value!r} must be one of {', '.join(map(str, DTYPES))}, or None")


def function(**values: Any) -> None:
    """Each callable, or None."""
    for name, value in values.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}: expected a function, got {value!r}")


def file_path(**values: Any) -> None:
    """Each a str, or a path that is one."""
    for name, value in values.items():
        if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
            raise TypeError(f"{name}: expected a path, got {value!r}")


def random_source(**values: Any) -> None:
    """Each a ``torch.Generator``, or None for torch's own."""
    for name, value in values.items():
        if value is not None and not isinstance(value, torch.Generator):
            raise TypeError(f"{name}: {value!r} must be a torch.Generator or None")


def draws_on(device: torch.device, **values: torch.Generator | None) -> None:
    """Each a source of tensors on a device, or None."""
    for name, value in values.items():
        if value is not None and device.type not in (value.device.type, "meta"):
            raise ValueError(
                f"{name}: draws on {value.device}, but the tensors are on {device}; use torch.Generator('{device}')"
            )


def number(**values: float) -> None:
    """Each a number, finite or not."""
    for name, value in values.items():
        _is_finite(name, value)


def finite(**values: float) -> None:
    """Each a finite number."""
    for name, value in values.items():
        _check(name, value, "finite", _is_finite(name, value))


def at_least_0(**values: float) -> None:
    """Each finite and at least 0."""
    for name, value in values.items():
        _check(name, value, "finite and at least 0", _is_finite(name, value) and value >= 0)


def factors(**values: float) -> None:
    """Each a factor of gains: finite, in float32, too, and at least 0."""
    at_least_0(**values)
    for name, value in values.items():
        _check(name, value, "below 2**128", value < 2**128)


def above_0(**values: float) -> None:
    """Each finite and above 0."""
    for name, value in values.items():
        _check(name, value, "finite and above 0", _is_finite(name, value) and value > 0)


def _is_finite(name: str, value: float) -> bool:
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value}")
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False
    except (TypeError, ValueError, RuntimeError):  # the last two are a tensor's of several numbers
        raise TypeError(f"{name}: expected a number, got {_kind(value)}") from None


def _check(name: str, value: float, right: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name}: {value} must be {right}")


def _kind(value: Any) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{type(value).__name__}{shape}"
