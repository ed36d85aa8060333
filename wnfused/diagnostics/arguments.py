"""The checks that measurements share; each names the argument, what it was and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wnfused._numbers import random_source

Loss = Callable[[Tensor, Tensor], Tensor]
"""From (outputs, targets) to the *sum* of the samples' losses: no sample's share depends on how many there are."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The default loss, summed over the samples."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")


def check_inputs(inputs: Tensor) -> None:
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs: expected a Tensor, got {type(inputs).__name__}")
    if inputs.dim() == 0 or inputs.shape[0] == 0:
        raise ValueError(f"inputs: shape {list(inputs.shape)} has no sample to measure; use [n, ...] with n >= 1")


def check_targets(targets: Tensor, inputs: Tensor) -> None:
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets: expected a Tensor, got {type(targets).__name__}")
    if targets.dim() == 0 or targets.shape[0] != inputs.shape[0]:
        raise ValueError(f"targets: shape {list(targets.shape)} does not fit {inputs.shape[0]} samples")


def mini_batches(inputs: Tensor, targets: Tensor, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive slices of ``batch_size`` samples, the last as long as what is left; None: all at once."""
    size = len(inputs) if batch_size is None else batch_size
    for begin in range(0, len(inputs), size):
        yield inputs[begin : begin + size], targets[begin : begin + size]


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The caller's source of randomness, or one that starts from 0: a measurement repeated is the same."""
    random_source(generator=generator)
    return torch.Generator().manual_seed(0) if generator is None else generator
