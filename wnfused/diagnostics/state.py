"""Measuring leaves a model, its inputs and torch's random state as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from wnfused._undisturbed import as_written, buffers_kept, forked
from wnfused.nn._layer import refuse_shapeless


@contextlib.contextmanager
def undisturbed(model: nn.Module, *, freeze: bool = True) -> Iterator[None]:
    """Afterwards buffers (running statistics), tensors that are plain attributes (such as the weight that torch's old
    weight norm makes anew in every call), ``requires_grad`` and torch's random state are what they were. Meanwhile
    compiled modules run as they were written.

    Args:
        freeze: meanwhile no parameter asks for a gradient, so that a backward pass towards activations computes no
            weight gradient.
    """
    refuse_shapeless(model, "run the model once")
    attributes = [
        (module.__dict__, name, value)
        for module in model.modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor)
    ]
    asking = [(p, p.requires_grad) for p in model.parameters()]
    with forked(model), buffers_kept(model), as_written():
        try:
            if freeze:
                for p, _ in asking:
                    p.requires_grad_(False)
            yield
        finally:
            for p, asked in asking:
                p.requires_grad_(asked)
            for table, name, value in attributes:
                table[name] = value


def outputs_of(model: Callable[[Tensor], Any], inputs: Tensor) -> Any:
    """``model(inputs)`` for a copy of the inputs: a model may write what it is given in place."""
    return model(inputs.clone())
