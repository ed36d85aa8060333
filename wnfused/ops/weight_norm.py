"""``weight_norm``: rows of given norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from wnfused import reference
from wnfused.ops import _arguments as arguments
from wnfused.ops import _products
from wnfused.ops._direct import FIRST_DIM, is_plain_call
from wnfused.ops._registration import below_autograd, define, differentiable


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


def _is_direct(v: Tensor, g: Tensor, dim: int | None) -> bool:
    """Whether the op in C++ takes the call, which has a node with derivatives of every order."""
    return (
        dim is FIRST_DIM
        and is_plain_call(v, v, g, None, None)
        and _products.has_op(v, g)
        and v.is_contiguous()
        and v.dim() > 0
        and g.dim() in (1, v.dim())
        and g.shape[0] == v.shape[0]
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
        return _products.weight_norm(v, g, dim)[0]
    except RuntimeError:
        _check(v, g, dim)
        raise


@arguments.quiet_in_a_trace
def _check(v: Tensor, g: Tensor, dim: int | None) -> None:
    arguments.floating("v", v)
    arguments.matches("g", g, v, "v")
    arguments.gain(g, v, dim)
