"""The backends: modules that have one function for each op, all with the op's own signature.

A backend has ``unavailable() -> str | None``, the reason why nothing of it runs here, and
``refusal(op, arguments) -> str | None``, the reason why it cannot run this op on these arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 0)
"""Of a GPU: cp.async and the matrix instructions for bfloat16 and tf32 came with it."""


def allows_tf32(operation: Literal["conv", "matmul"]) -> bool:
    """Whether products of float32 on a GPU may be rounded to tf32: what torch is told of cuDNN's convolutions, or of
    cuBLAS's products. Where it is told nothing of these, its flag answers with the wider one."""
    backends = torch.backends
    flag = backends.cudnn.conv if operation == "conv" else backends.cuda.matmul  # type: ignore[attr-defined]
    return bool(flag.fp32_precision == "tf32")


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
