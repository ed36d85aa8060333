"""The multi-layer perceptron."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from wnfused._numbers import counts
from wnfused.models._common import checked_norm, linear_relu


class MLP(nn.Module):
    """``depth`` hidden layers ``Linear + ReLU`` of one width, then a plain linear head; inputs are flattened.

    Args:
        depth, width, num_classes, norm: as in ``mlp``.
        in_features: numbers of one flattened input.

    Raises:
        ValueError: naming the argument, its value and what is right; an input that is no batch.
    """

    def __init__(self, depth: int, width: int, num_classes: int, in_features: int, norm: str) -> None:
        super().__init__()
        depth, width, num_classes, in_features = counts(
            depth=depth, width=width, num_classes=num_classes, in_features=in_features
        )
        norm = checked_norm(norm)
        widths = [in_features] + [width] * depth
        self.layers = nn.Sequential(*(linear_relu(norm, a, b) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.dim() < 2:  # torch.fx traces with what is no tensor
            raise ValueError(f"x: shape {list(x.shape)} must be [n, ...] for n samples")
        return self.head(self.layers(x.flatten(1)))


def mlp(
    depth: int, width: int = 512, num_classes: int = 10, in_channels: int = 1, norm: str = "weight", *,
    image_size: int = 28, in_features: int | None = None,
) -> MLP:  # fmt: skip
    """An MLP of ``depth`` hidden layers (Arpit, Campos & Bengio 2019, Table 3: 2 to 200, width 512 or 1024; MNIST).

    Args:
        depth: number of hidden layers, at least 1.
        width: units a hidden layer.
        num_classes: outputs.
        in_channels, image_size: the input is ``in_channels`` square maps of this size, flattened.
        in_features: or say the flattened size itself, a multiple of ``in_channels``; ``image_size`` is not read then.
        norm: ``"weight"``, ``"batch"`` or ``"none"``.

    Raises:
        ValueError: naming the argument, its value and what is right.
    """
    (in_channels,) = counts(in_channels=in_channels)
    if in_features is None:
        (image_size,) = counts(image_size=image_size)
        in_features = in_channels * image_size**2
    (in_features,) = counts(in_features=in_features)
    if in_features % in_channels:
        raise ValueError(f"in_features: {in_features} is no multiple of in_channels, {in_channels}")
    return MLP(depth, width, num_classes, in_features, norm)
