"""What the networks share: checks of ``norm``, the layer followed by a ReLU in each normalisation, and
the layout of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wnfused.nn import WNConv2d, WNLinear

NORMS = ("weight", "batch", "none")
RESIDUAL_NORMS = (*NORMS, "fixup")


def checked_norm(norm: str, norms: tuple[str, ...] = NORMS) -> str:
    if norm not in norms:
        *first, last = map(repr, norms)
        raise ValueError(f"norm: unknown {norm!r}; use {', '.join(first)} or {last}")
    return norm


def linear_relu(norm: str, in_features: int, out_features: int) -> nn.Module:
    if norm == "weight":
        return WNLinear(in_features, out_features, activation="relu")
    if norm == "batch":
        linear = nn.Linear(in_features, out_features, bias=False)
        return nn.Sequential(linear, nn.BatchNorm1d(out_features), nn.ReLU())
    return nn.Sequential(nn.Linear(in_features, out_features), nn.ReLU())


def conv_relu(norm: str, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if norm == "weight":
        return WNConv2d(in_channels, out_channels, 3, stride, 1, activation="relu")
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=norm == "none")
    if norm == "batch":
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())
    return nn.Sequential(conv, nn.ReLU())


def laid_out_for(first: nn.Module, images: Tensor) -> Tensor:
    """In channels_last where a weight-normalised convolution reads them on a CPU.

    What is behind it keeps that layout, which is its kernels' own; in NCHW each layer copies its input and output.
    """
    # What stands for them in a symbolic trace has no layout, and under vmap none can be asked for.
    if not isinstance(images, Tensor) or torch._C._are_functorch_transforms_active():
        return images
    if isinstance(first, WNConv2d) and images.is_cpu and images.dim() == 4:
        return images.contiguous(memory_format=torch.channels_last)
    return images
