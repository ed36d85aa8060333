"""The checks that measurements share; each names the argument, what it was and what is right."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from wnfused._modules import check_module
from wnfused._numbers import random_source

Loss = Callable[[Tensor, Tensor], Tensor]
"""From (outputs, targets) to the *sum* of the samples' losses: no sample's share depends on how many there are."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The default loss, summed over the samples.

    Args:
        outputs: ``[n, classes, ...]``.
        targets: classes ``[n, ...]``, int64 or uint8, with torch's -100 for what has none; or probabilities of the
            outputs' shape.
    """
    check_logits(outputs)
    check_classes(outputs, targets)
    return F.cross_entropy(outputs, targets, reduction="sum")


def checked_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """``loss(outputs, targets)``, one number."""
    total = loss(outputs, targets)
    if not isinstance(total, Tensor):
        raise TypeError(f"loss: must return a Tensor, not {type(total).__name__}")
    if total.numel() != 1:
        raise ValueError(f"loss: must return the sum over the samples, not a tensor of shape {list(total.shape)}")
    return total.reshape(())


def check_logits(outputs: Any, remedy: str = "a loss") -> None:
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        what = f"a tensor of shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        purpose = "the cross-entropy" if remedy == "a loss" else "their likeliest classes"
        raise TypeError(f"model: expected logits [n, classes] for {purpose}, got {what}; give {remedy}")


def check_classes(outputs: Tensor, targets: Tensor, *, for_all: bool = False) -> None:
    """What the cross-entropy takes beside ``outputs [n, classes, ...]``; ``for_all``: a class for each of them, int64,
    as what picks its logit needs."""
    wanted, classes = [outputs.shape[0], *outputs.shape[2:]], outputs.shape[1]
    if targets.device != outputs.device:
        raise ValueError(f"targets: are on {targets.device}, the model's outputs on {outputs.device}; use one device")
    if targets.is_floating_point() and not for_all:
        if targets.shape != outputs.shape:
            raise ValueError(
                f"targets: {targets.dtype} of shape {list(targets.shape)} are no probabilities of shape "
                f"{list(outputs.shape)}; use these, or classes {wanted} in int64"
            )
        return
    if targets.dtype not in ((torch.int64,) if for_all else (torch.int64, torch.uint8)):
        raise TypeError(f"targets: expected classes in int64, got {targets.dtype}")
    if list(targets.shape) != wanted:
        raise ValueError(f"targets: shape {list(targets.shape)} does not fit; use {wanted}, a class for each output")
    wrong = (targets < 0) | (targets >= classes)
    if not for_all:
        wrong &= targets != _NO_CLASS
    if wrong.any():
        raise ValueError(f"targets: {targets[wrong][0]} is none of the model's {classes} classes, 0 to {classes - 1}")


# What torch's cross-entropy leaves out.
_NO_CLASS = -100


def check_differentiable() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("torch.inference_mode: nothing can be differentiated inside of it; measure outside")


def check_model(model: nn.Module) -> None:
    check_module(model=model)


def check_inputs(inputs: Tensor) -> None:
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs: expected a Tensor, got {type(inputs).__name__}")
    if inputs.is_meta:
        raise ValueError("inputs: is a meta tensor, without numbers; use one on the model's device")
    if inputs.dim() == 0 or inputs.shape[0] == 0:
        raise ValueError(f"inputs: shape {list(inputs.shape)} has no sample to measure; use [n, ...] with n >= 1")


def check_by_sample(what: str, x: Tensor, samples: int) -> None:
    if list(x.shape[:1]) != [samples]:
        raise ValueError(f"{what}, {list(x.shape)}, is not one for each of {samples} samples")


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


def floats(name: str, values: ArrayLike) -> np.ndarray:
    """One number or an array of them as an array of floats."""
    try:
        array = np.asarray(values)
        if not all(isinstance(value, numbers.Real) for value in array.ravel().tolist()):  # None would become NaN
            raise TypeError
        return array.astype(float)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is a tensor's with a graph
        raise TypeError(f"{name}: expected numbers, got {values!r}") from None


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The caller's source of randomness, or one that starts from 0: a measurement repeated is the same."""
    random_source(generator=generator)
    return torch.Generator().manual_seed(0) if generator is None else generator


def gaussian(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Standard normal numbers on ``like``'s device, in its dtype or in float32 where that is the wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=wide).to(like.device)
