"""What follows a vendor's product: residual and activation in place, and the activation's mask on the way back."""

from __future__ import annotations

import torch
from torch import Tensor


def epilogue_(y: Tensor, residual: Tensor | None, activation: str, negative_slope: float) -> Tensor:
    """``y <- act(y + residual)``."""
    if residual is not None:
        y += residual
    if activation == "relu":
        return y.relu_()
    if activation == "leaky_relu":
        return torch.nn.functional.leaky_relu_(y, negative_slope)
    return y


def mask_of(activation: str, negative_slope: float) -> str:
    """The activation whose mask a layer's backward applies: a leaky ReLU of slope 0 is a ReLU, where dy is infinite and
    where y is NaN, too."""
    return "relu" if activation == "leaky_relu" and negative_slope == 0 else activation


def masked(dy: Tensor, y: Tensor, activation: str, negative_slope: float) -> Tensor:
    """The gradient before the activation, in one pass; the mask is read off the output, whose sign is the input's."""
    activation = mask_of(activation, negative_slope)
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, y, 0)
    if activation == "leaky_relu":
        return torch.ops.aten.leaky_relu_backward(dy, y, negative_slope, True)
    return dy
