"""What functions ask of plain numbers and flags; an error names the argument, its value and what is right."""

from __future__ import annotations

import math


def positive(**values: int) -> None:
    """Each an int of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {value!r} must be an int of at least 1")


def flag(**values: bool) -> None:
    """Each True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} must be True or False")


def finite(**values: float) -> None:
    """Each a finite number."""
    for name, value in values.items():
        _check(name, value, "finite", _is_finite(name, value))


def at_least_0(**values: float) -> None:
    """Each finite and at least 0."""
    for name, value in values.items():
        _check(name, value, "finite and at least 0", _is_finite(name, value) and value >= 0)


def above_0(**values: float) -> None:
    """Each finite and above 0."""
    for name, value in values.items():
        _check(name, value, "finite and above 0", _is_finite(name, value) and value > 0)


def _is_finite(name: str, value: float) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None


def _check(name: str, value: float, right: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name}: {value} must be {right}")
