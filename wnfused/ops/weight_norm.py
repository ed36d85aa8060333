"""``weight_norm``: rows of given norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from wnfused import reference
from wnfused.backends import native
from wnfused.ops import _arguments as arguments
from wnfused.ops import _products
from wnfused.ops._direct import FIRST_DIM, is_open
from wnfused.ops._registration import (
    below_autograd,
    define,
    differentiable,
    is_transformed,
    no_view,
    through_reference,
)  # fmt: skip


def _fake(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    norm = v.new_empty([] if dim is None else [v.shape[dim]], dtype=reference.wide(v.dtype))
    return torch.empty_like(v, memory_format=reference.suggest_memory_format(v)), norm


def _fake_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v, memory_format=reference.suggest_memory_format(v)), g.new_empty(g.shape)


_op = define("weight_norm(Tensor v, Tensor g, int? dim=0) -> (Tensor w, Tensor norm)", _fake, like=(0, None))
_op_backward = define(
    "weight_norm_backward(Tensor dw, Tensor v, Tensor g, Tensor norm, int? dim=0) -> (Tensor dv, Tensor dg)",
    _fake_backward,
    like=(1, None),
)


def _backward(
    dw: Tensor, inputs: Sequence[Any], outputs: Sequence[Any], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    v, g, dim = inputs
    dv, dg = below_autograd(_op_backward, (dw, v, g, outputs[1], dim))
    return dv if needs[0] else None, dg if needs[1] else None


_call = differentiable(_op, reference=reference.weight_norm, backward=_backward, transformed=_products.weight_norm)


class _Direct(torch.autograd.Function):
    """The fast path of ``wnfused.ops._direct``: the C++ kernel and no other, for contiguous rows along dim 0."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor) -> Tensor:
        w, norm = torch.ops.wnfused_native.weight_norm.default._op(v, g, 0)
        ctx.save_for_backward(v, g, norm)
        return no_view(w)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        return arguments.below_autocast(_gradients, ctx, dw)


def _gradients(ctx: Any, dw: Tensor) -> Any:
    v, g, norm = ctx.saved_tensors
    if torch.is_grad_enabled() or is_transformed(dw):
        return through_reference(reference.weight_norm, dw, (v, g), ctx.needs_input_grad)
    dv, dg = native.weight_norm_backward(dw, v, g, norm)
    return dv if ctx.needs_input_grad[0] else None, dg if ctx.needs_input_grad[1] else None


_Direct.__name__ = _Direct.__qualname__ = "weight_norm"
# torch.autograd.Function.apply itself: a look for functorch transforms, which is_open has seen to, and this.
_record = super(torch.autograd.Function, _Direct).apply


def _is_direct(v: Tensor, g: Tensor, dim: int | None) -> bool:
    return (
        dim is FIRST_DIM
        and is_open(v, v, g, None, None)
        and v.is_contiguous()
        and v.dim() > 0
        and g.dim() in (1, v.dim())
        and g.shape[0] == v.shape[0]
        and g.dtype in (v.dtype, torch.float32)
    )


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> Tensor:
    """The effective weight ``w_i = g_i v_i / ||v_i||_2``, row by row.

    Args:
        v: direction tensor of any shape with at least one dim; floating point.
        g: gain of each row, in torch's weight-norm shape (1 in every dim but ``dim``) or flat ``[v.shape[dim]]``;
            in the dtype of ``v`` or float32.
        dim: the dim that numbers the rows; None for one norm over the whole tensor.

    Returns:
        ``w`` in the shape and dtype of ``v``. A row of zeros gives zeros, with zero gradients.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: Salimans & Kingma 2016, eq. 2; Arpit, Campos & Bengio 2019, eq. 1.
    """
    if not _is_direct(v, g, dim):
        if arguments.has_override((v, g)):
            return handle_torch_function(weight_norm, (v, g), v, g, dim)
        _check(v, g, dim)
        return _call(v, g, dim)[0]
    try:
        return _record(v, g) if torch.is_grad_enabled() else native.weight_norm(v, g)[0]
    except (RuntimeError, TypeError):
        _check(v, g, dim)
        raise


@arguments.quiet_in_a_trace
def _check(v: Tensor, g: Tensor, dim: int | None) -> None:
    arguments.floating("v", v)
    arguments.matches("g", g, v, "v")
    arguments.gain(g, v, dim)
