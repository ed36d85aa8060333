"""Measuring leaves a model as it was, and measures the same function every time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def undisturbed(model: nn.Module, *, freeze: bool = True) -> Iterator[None]:
    """Afterwards buffers (running statistics), ``requires_grad`` and torch's random state are what they were.

    Args:
        freeze: meanwhile no parameter asks for a gradient, so that a backward pass towards activations computes no
            weight gradient.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    asking = [p for p in model.parameters() if p.requires_grad] if freeze else []
    with forked(model):
        for p in asking:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in asking:
                p.requires_grad_(True)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextlib.contextmanager
def forked(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Random numbers drawn inside (dropout) do not move torch's state, and start from ``seed`` if it is given."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield
