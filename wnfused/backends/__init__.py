"""The backends: modules that have one function for each op, all with the op's own signature.

A backend has ``unavailable() -> str | None``, the reason why nothing of it runs here, and
``refusal(op, arguments) -> str | None``, the reason why it cannot run this op on these arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def tensors_of(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor among an op's arguments, those in lists too."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from (item for item in argument if isinstance(item, Tensor))


def operands_of(op: str, arguments: Sequence[Any]) -> Iterator[Tensor]:
    """Those whose dtype a kernel must know: a residual stage's signs, which come last in its backward, are bytes."""
    return tensors_of(arguments[:9] if op == "residual_stage_backward" else arguments)


def row_dim(op: str, arguments: Sequence[Any]) -> int | None:
    """The dim that numbers the rows of a weight norm; torch leaves a trailing argument out where it is the default."""
    place = 4 if op.endswith("_backward") else 2
    return arguments[place] if len(arguments) > place else 0
