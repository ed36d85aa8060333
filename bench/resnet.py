"""A network as its users write it: torch's own layers, ReLUs as functions, nothing of this package."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """``relu(conv(relu(conv(x))) + shortcut(x))``, the shortcut a 1x1 convolution where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """``depth = 6 N + 2`` layers for 32x32 images, without normalisation: He et al. 2016, section 4.2."""

    def __init__(self, depth: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, 1, 1)
        sizes = [width, *(width for _ in range((depth - 2) // 6))]
        for wider in (2 * width, 4 * width):
            sizes += [wider] * ((depth - 2) // 6)
        self.blocks = nn.Sequential(*(Block(a, b, 2 if a != b else 1) for a, b in itertools.pairwise(sizes)))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu(self.stem(x)))
        return self.head(y.mean((2, 3)))
