"""The reference as a backend: plain torch, on any device, for any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wnfused.reference import (
    conv,
    conv_backward,
    linear,
    linear_backward,
    residual_stage,
    residual_stage_backward,
    weight_norm,
    weight_norm_backward,
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
]


def unavailable() -> str | None:
    return None


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    return None
