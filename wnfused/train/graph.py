"""A model's forward and backward as CUDA graphs: recorded once, replayed at every step.

A network of thousands of small kernels waits for its launches; a graph launches them all at once. Shapes are fixed: an
input of another shape, such as the last batch of an epoch, runs as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn


class GraphedModel:
    """``graphed(images)`` replays where ``images`` has the shape and dtype of the first batch, and launches otherwise.

    The gradients are those of ``model``; they end in the same ``parameters()``.

    Args:
        model: on a CUDA device, in training mode.
        images: a batch of the shape to record. Its numbers do not matter; the model's buffers, such as a batch norm's
            averages, are put back to what they were.
        autocast: the dtype of the autocast that training runs under, or None.
        accumulates: gradients of several batches are to be summed in ``grad``. A replay writes them where the replay
            before it did, and there ``grad`` lies from the first batch on (pytorch issue 181723): each is copied then.
    """

    def __init__(
        self, model: nn.Module, images: Tensor, autocast: torch.dtype | None = None, *, accumulates: bool = False
    ) -> None:
        self.shape, self.dtype = images.shape, images.dtype
        self._launched: Callable[[Tensor], Tensor] = model.forward
        buffers = [buffer.clone() for buffer in model.buffers()]
        # Autocast's cache of converted weights would be filled during the recording and freed after it.
        context = torch.autocast("cuda", autocast, cache_enabled=False) if autocast else contextlib.nullcontext()
        with context, torch.cuda.device(images.device) if images.is_cuda else contextlib.nullcontext():
            torch.cuda.make_graphed_callables(model, (torch.zeros_like(images),))
        # It replaced the instance's forward by one that takes every shape for the recorded one.
        self._replayed: Callable[[Tensor], Tensor] = model.__dict__.pop("forward")
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        if accumulates:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(torch.clone)

    def __call__(self, images: Tensor) -> Tensor:
        same = images.shape == self.shape and images.dtype == self.dtype
        return self._replayed(images) if same else self._launched(images)
