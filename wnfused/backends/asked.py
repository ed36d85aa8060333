"""Which gradients of a layer are asked for: ``dx``, ``dv`` with ``dg``, ``dbias``, ``dz``, a flag or a bit each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def asked_of(x: bool, v: bool, g: bool, bias: bool, residual: bool) -> list[bool]:
    """The flags, from those of what a layer takes."""
    return [x, v or g, bias, residual]


def bits_of(asked: Sequence[bool]) -> int:
    """As the ops in C++ take them (``csrc/needs.h``)."""
    return sum(flag << i for i, flag in enumerate(asked))


def flags_of(bits: int, count: int = 4) -> list[bool]:
    """Of what ``bits_of`` made."""
    return [bool(bits >> i & 1) for i in range(count)]


def given(found: Sequence[Tensor | None], dy: Tensor) -> Any:
    """An op's outputs: what was not asked for is empty."""
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in found)
