"""The reference as a backend: plain torch, on any device, for any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wnfused import reference
from wnfused.reference import (
    conv,
    conv_backward,
    linear,
    linear_backward,
    weight_norm,
    weight_norm_backward,
    weight_norm_many,
    weight_norm_many_backward,
)

__all__ = [
    "conv",
    "conv_backward",
    "linear",
    "linear_backward",
    "residual_stage",
    "residual_stage_backward",
    "weight_norm",
    "weight_norm_backward",
    "weight_norm_many",
    "weight_norm_many_backward",
]


def unavailable() -> str | None:
    return None


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    return None


# What an op promises beside the mathematics: a stage keeps channels_last.


def residual_stage(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, norm, maps = reference.residual_stage(x, *arguments)
    return y.contiguous(memory_format=reference.suggest_memory_format(x)), norm, maps


def residual_stage_backward(
    dy: Tensor, v: Tensor, g: Tensor, bias: Tensor, norm: Tensor, maps: Tensor, skip_scale: float = 1.0,
    recompute: int = 0, parameters: bool = True, signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = (v, g, bias, norm, maps, skip_scale, recompute, parameters)
    dx, dv, dg, dbias = reference.residual_stage_backward(dy, *arguments)
    return dx.contiguous(memory_format=reference.suggest_memory_format(dy)), dv, dg, dbias
