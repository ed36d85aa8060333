"""What a layer on the fast path records for autograd: the gradients of its node, and that node in Python.

The node is ``csrc/autograd``'s where that library is at hand, Python's where it is not; both keep the same tensors and
give the same gradients. Most gradients are one call of a kernel. What is more than that stands here, once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wnfused.backends.asked import asked_of, bits_of, flags_of
from wnfused.ops._arguments import below_autocast
from wnfused.ops._input_gradient import (
    asks_for_input_alone,
    input_gradient,
    is_of_input_alone,
    is_zero_gradient,
    leaves_of,
    zeros_through,
)
from wnfused.ops._registration import is_transformed, no_view, through_reference

# Multiply-adds of a product from which a weight's gradient costs far more than the question whether it is asked for.
_WORTH_ASKING = 2**25

Found = Sequence[Tensor | None]
"""Gradients by ``x, v, g``, the bias and the residual; None where they are not wanted."""


class Gradients:
    """Those of one kind of layer. ``name, kernel, kernel_backward, reference``: as in ``wnfused.ops._direct.layer``.

    In all methods ``y`` is None without an activation, ``inputs`` are ``x, v, g``, bias and residual, the last two
    None where there are none, and ``needs`` says by which of them the running backward wants a gradient.
    """

    def __init__(
        self, name: str, kernel: Callable[..., Any], kernel_backward: Callable[..., Any],
        reference: Callable[..., tuple[Tensor, ...]],
    ) -> None:  # fmt: skip
        self.kernel, self._kernel_backward, self._reference = kernel, kernel_backward, reference
        self._by_input = input_gradient(name, kernel, kernel_backward, reference)

    def by_kernel(
        self, dy: Tensor, y: Tensor | None, inputs: Sequence[Any], norm: Tensor, needs: Sequence[bool],
        constants: Sequence[Any],
    ) -> Found:  # fmt: skip
        x, v, g = inputs[:3]
        wanted = bits_of(asked_of(*needs))
        *found, dz = self._kernel_backward(dy, dy if y is None else y, x, v, g, norm, wanted, *constants)
        return *found, dy if needs[4] and y is None else dz

    def with_graph(
        self, dy: Tensor, y: Tensor | None, inputs: Sequence[Any], norm: Tensor, needs: Sequence[bool],
        constants: Sequence[Any],
    ) -> Found:  # fmt: skip
        """Gradients with derivatives of their own, or of a batch."""
        x, v, g, bias, residual = inputs
        if is_transformed(dy) or not is_of_input_alone(needs):
            return through_reference(self._reference, dy, (*inputs, *constants), needs)[:5]
        constant = [None if t is None else t.detach() for t in (x, bias, residual)]
        dx, dz = self._by_input(dy, v, g, y, *constant, norm, needs[4], constants)
        return dx, None, None, None, dy if needs[4] and y is None else dz

    def of_native_node(self, dy: Tensor, y: Tensor | None, *others: Any) -> Found:
        """What a node in C++ calls back for. ``others``: inputs, norm, needs in bits, constants."""
        *inputs, norm, bits = others[:7]
        needs, constants = flags_of(bits, 5), others[7:]
        if torch.is_grad_enabled() or is_transformed(dy):
            return self.with_graph(dy, y, inputs, norm, needs, constants)
        if is_zero_gradient(dy):
            return zeros_through(inputs, needs, [t is not None and t.is_leaf for t in inputs])
        found: Found = below_autocast(self.by_kernel, dy, y, inputs, norm, needs, constants)
        return found


def python_node(name: str, gradients: Gradients) -> Callable[..., Tensor]:
    """A function of a kernel's arguments that gives ``y`` and records the layer."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            y, norm = gradients.kernel(*arguments)
            y = no_view(y)
            ctx.constants = constants = arguments[5:]
            # Without an activation the backward does not read y. The order is that of the op's own derivative: a
            # checkpoint may run the forward again under another backend.
            ctx.save_for_backward(*arguments[:5], y if constants[-2] else None, norm)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return *below_autocast(backward_of, ctx, dy), *(None,) * len(ctx.constants)

    def backward_of(ctx: Any, dy: Tensor) -> Found:
        *inputs, y, norm = ctx.saved_tensors
        constants, needs = ctx.constants, ctx.needs_input_grad[:5]
        with_graph = torch.is_grad_enabled() or is_transformed(dy)
        if not with_graph and is_zero_gradient(dy):
            return zeros_through(inputs, needs, leaves_of(ctx, inputs))
        _, v, g = inputs[:3]
        products_are_many = dy.numel() * v.numel() >= _WORTH_ASKING * g.numel()
        # torch tells a node in Python what requires a gradient; whether anyone asked for it, it must be asked.
        if needs[0] and (with_graph or products_are_many) and asks_for_input_alone(ctx, needs):
            needs = (True, False, False, False, needs[4])
        give = gradients.with_graph if with_graph else gradients.by_kernel
        return give(dy, y, inputs, norm, needs, constants)

    Direct.__name__ = Direct.__qualname__ = name
    # torch.autograd.Function.apply itself: a look for functorch transforms, which is_open has seen to, and this.
    record: Callable[..., Tensor] = super(torch.autograd.Function, Direct).apply
    return record
