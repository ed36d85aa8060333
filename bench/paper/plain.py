"""Plain networks and plain SGD, as paper (c) trains them: no normalisation, no bias, no momentum, one constant rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.paper.figure import number
from wnfused.train.data import Dataset, load


def relu_mlp(layers: int, width: int, features: int, classes: int) -> nn.Sequential:
    """``layers`` linear layers, the last one the head, with ReLU between them."""
    widths = [features, *[width] * (layers - 1)]
    made: list[nn.Module] = [nn.Flatten()]
    for n, m in itertools.pairwise(widths):
        made += [nn.Linear(n, m, bias=False), nn.ReLU()]
    return nn.Sequential(*made, nn.Linear(widths[-1], classes, bias=False))


def centred(data: Dataset) -> Tensor:
    """The training images with pixels in [-1, 1]."""
    images = data.train.images.float()
    return 2 * images / (16 if data.name == "digits" else 255) - 1


def loaded(name: str) -> Dataset:
    """The same split for every seed."""
    return load(name, 0)


def logits_gap(outputs: Tensor) -> float | None:
    """The published code's gap of the head's outputs ``[n, k]``: ``|| s / ||s|| - 1/sqrt k ||``, s their singular
    values."""
    s = torch.linalg.svdvals(outputs.double())
    return number(torch.linalg.vector_norm(s / s.norm() - 1 / math.sqrt(len(s))))


def sgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    lr: float,
    batch_size: int,
    epochs: int,
    seed: int,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[float | None]:
    """The mean loss of each epoch, each image's as it was when it was trained on; None from where it diverged."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # dropout
    losses: list[float | None] = []
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(images), generator=generator).split(batch_size):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(number(total / len(images)))
        if losses[-1] is None:
            return losses + [None] * (epochs - len(losses))
        after_epoch()
    return losses
