"""Measuring leaves a model as it was, and measures the same function every time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from wnfused._undisturbed import buffers_kept, forked
from wnfused.nn._layer import refuse_shapeless


@contextlib.contextmanager
def undisturbed(model: nn.Module, *, freeze: bool = True) -> Iterator[None]:
    """Afterwards buffers (running statistics), ``requires_grad`` and torch's random state are what they were.

    Args:
        freeze: meanwhile no parameter asks for a gradient, so that a backward pass towards activations computes no
            weight gradient.
    """
    refuse_shapeless(model, "run the model once")
    asking = [(p, p.requires_grad) for p in model.parameters()]
    with forked(model), buffers_kept(model):
        try:
            if freeze:
                for p, _ in asking:
                    p.requires_grad_(False)
            yield
        finally:
            for p, asked in asking:
                p.requires_grad_(asked)
