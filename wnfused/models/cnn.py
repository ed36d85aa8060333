"""The convolutional network without shortcuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wnfused._numbers import counts
from wnfused.models._common import checked_norm, conv_relu, laid_out_for


class CNN(nn.Module):
    """``depth`` 3x3 convolutions with ReLU, the first two of stride 2; global average pooling; a plain head.

    Args:
        depth, width, num_classes, in_channels, norm: as in ``cnn``.

    Raises:
        ValueError: naming the argument, its value and what is right.
    """

    def __init__(self, depth: int, width: int, num_classes: int, in_channels: int, norm: str) -> None:
        super().__init__()
        depth, width, num_classes, in_channels = counts(
            depth=depth, width=width, num_classes=num_classes, in_channels=in_channels
        )
        if depth < 2:
            raise ValueError(f"depth: {depth} must be at least 2, for the two strided convolutions")
        norm = checked_norm(norm)
        channels = [in_channels] + [width] * depth
        self.layers = nn.Sequential(
            *(conv_relu(norm, channels[i], width, stride=2 if i < 2 else 1) for i in range(depth))
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # a folded network has none of these layers
            x = laid_out_for(self.layers[0], x)
        return self.head(self.layers(x).mean((-2, -1)))


def cnn(depth: int, width: int = 512, num_classes: int = 10, in_channels: int = 3, norm: str = "weight") -> CNN:
    """A CNN of ``depth`` convolutions of one width (Arpit, Campos & Bengio 2019, Table 4: 5, 25, 100; width 512).

    Args:
        depth: number of convolutions, at least 2.
        width: channels of each.
        num_classes: outputs.
        in_channels: channels of the input, ``[N, in_channels, H, W]`` of any size.
        norm: ``"weight"``, ``"batch"`` or ``"none"``.

    Raises:
        ValueError: naming the argument, its value and what is right.
    """
    return CNN(depth, width, num_classes, in_channels, norm)
