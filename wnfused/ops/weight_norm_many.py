"""``weight_norm_many``: the rows of many tensors, all layers of a model say, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from wnfused import dispatch, reference
from wnfused.ops import _arguments as arguments
from wnfused.ops._registration import (
    below_autograd,
    define,
    is_exporting_or_tracing,
    is_transformed,
    same_backend,
    through_reference,
)  # fmt: skip
from wnfused.ops.weight_norm import weight_norm

Tensors = Sequence[Tensor]


def _numbers(v: Tensors, dim: int | None) -> list[Tensor]:
    return [t.new_empty([] if dim is None else [t.shape[dim]], dtype=reference.wide(t.dtype)) for t in v]


def _fake(
    v: Tensors, g: Tensors, dim: int | None = 0, weights: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    w = [torch.empty_like(t, memory_format=reference.suggest_memory_format(t)) for t in v]
    return w if weights else [], _numbers(v, dim), _numbers(v, dim)


def _fake_backward(
    dw: Tensors, v: Tensors, g: Tensors, norm: Tensors, dim: int | None = 0
) -> tuple[list[Tensor], list[Tensor]]:
    dv = [torch.empty_like(t, memory_format=reference.suggest_memory_format(t)) for t in v]
    return dv, [t.new_empty(t.shape) for t in g]


def _in_formats_of(tensors: Tensors, models: Tensors) -> list[Tensor]:
    return [
        t if t.is_contiguous() and m.is_contiguous() else t.contiguous(memory_format=reference.suggest_memory_format(m))
        for t, m in zip(tensors, models, strict=True)
    ]


def _laid_out(outputs: Sequence[Tensors], arguments: Sequence[Any]) -> tuple[Tensors, ...]:
    w, *numbers = outputs
    return _in_formats_of(w, arguments[0]) if w else [], *numbers


def _laid_out_backward(outputs: Sequence[Tensors], arguments: Sequence[Any]) -> tuple[Tensors, Tensors]:
    dv, dg = outputs
    return _in_formats_of(dv, arguments[1]), dg


_op = define(
    "weight_norm_many(Tensor[] v, Tensor[] g, int? dim=0, bool weights=True) "
    "-> (Tensor[] w, Tensor[] norm, Tensor[] scale)",
    _fake,
    laid_out=_laid_out,
)
_op_backward = define(
    "weight_norm_many_backward(Tensor[] dw, Tensor[] v, Tensor[] g, Tensor[] norm, int? dim=0) "
    "-> (Tensor[] dv, Tensor[] dg)",
    _fake_backward,
    laid_out=_laid_out_backward,
)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensors]) -> None:
    v, g, *rest = inputs
    ctx.dim = rest[0] if rest else 0
    ctx.count = len(v)
    ctx.backend = dispatch.requested()
    _, norm, scale = output
    ctx.mark_non_differentiable(*norm, *scale)
    ctx.save_for_backward(*v, *g, *norm)


def _gradients(ctx: Any, dw: Sequence[Tensor | None], *_: Any) -> tuple[Any, ...]:
    n, saved = ctx.count, ctx.saved_tensors
    v, g, norm = saved[:n], saved[n : 2 * n], saved[2 * n :]
    given = [torch.zeros_like(t) if d is None else d for d, t in zip(dw, v, strict=True)]
    if torch.is_grad_enabled() or is_transformed(*given):
        pairs = [
            through_reference(reference.weight_norm, d, (a, b, ctx.dim), (True, True, False))
            for d, a, b in zip(given, v, g, strict=True)
        ]
        found = [dv for dv, *_ in pairs], [dg for _, dg, _ in pairs]
    else:
        with same_backend(ctx.backend):
            found = below_autograd(_op_backward, (given, v, g, norm, ctx.dim))
    # The dispatcher leaves out trailing arguments that have their defaults, and without `weights` there is no gradient.
    return (*map(list, found), *(None,) * (ctx.dim != 0))


torch.library.register_autograd(_op, _gradients, setup_context=_setup_context)


@arguments.quiet_in_a_trace
def _check(vs: Tensors, gs: Tensors, dim: int | None) -> None:
    for name, tensors in (("vs", vs), ("gs", gs)):
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name}: expected a list of tensors, got {type(tensors).__name__}")
    arguments.row_dim(dim)
    if len(vs) != len(gs):
        raise ValueError(f"gs: {len(gs)} gains do not fit {len(vs)} tensors vs; use one each")
    for i, (v, g) in enumerate(zip(vs, gs, strict=True)):
        arguments.floating(f"vs[{i}]", v)
        if v.device != vs[0].device:
            raise ValueError(f"vs[{i}]: on device {v.device}, but vs[0] is on {vs[0].device}; use one call a device")
        arguments.matches(f"gs[{i}]", g, v, f"vs[{i}]")
        try:
            arguments.gain(g, v, dim)
        except ValueError as error:
            raise ValueError(f"{error} (number {i} of the lists)") from None


def weight_norm_many(vs: Tensors, gs: Tensors, dim: int | None = 0) -> list[Tensor]:
    """The effective weights ``w_i = g_i v_i / ||v_i||_2`` of many tensors, as ``weight_norm`` gives each.

    One call of a kernel that works on the rows of all of them: a model of thousands of layers costs what its memory
    costs, not thousands of calls.

    Args:
        vs: direction tensors, of any shapes and floating-point dtypes, on one device.
        gs: as many gains, each in torch's weight-norm shape or flat; in the dtype of its ``v`` or float32.
        dim: the dim that numbers the rows of each; None for one norm over the whole of each tensor.

    Returns:
        The weights, in the order, shapes and dtypes of ``vs``.

    Raises:
        TypeError, ValueError: naming the argument, and its place in the list, that does not fit.

    Source: Salimans & Kingma 2016, eq. 2; Arpit, Campos & Bengio 2019, eq. 1.
    """
    tensors = (*vs, *gs) if isinstance(vs, (list, tuple)) and isinstance(gs, (list, tuple)) else ()
    if arguments.has_override(tensors):
        return handle_torch_function(weight_norm_many, tensors, vs, gs, dim)
    _check(vs, gs, dim)
    if not vs:
        return []
    # Transforms know no lists.
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if transformed or is_exporting_or_tracing():
        return [weight_norm(v, g, dim) for v, g in zip(vs, gs, strict=True)]
    return list(_op(list(vs), list(gs), dim)[0])


@torch.no_grad()
def row_scales_many(vs: Tensors, gs: Tensors, dim: int | None = 0) -> tuple[list[Tensor], list[Tensor]]:
    """The row norms ``||v_i||`` and scales ``s_i = g_i / ||v_i||`` (0 for a zero row) of many tensors.

    Reads each ``v`` once and writes nothing of its size.

    Args:
        vs, gs, dim: as in ``weight_norm_many``.

    Returns:
        ``(norms, scales)``: flat, one number a row (``[]`` for ``dim=None``); float32, or float64 for float64. Not
        differentiable.

    Raises:
        TypeError, ValueError: naming the argument, and its place in the list, that does not fit.

    Source: Salimans & Kingma 2016, eq. 2; Arpit, Campos & Bengio 2019, eq. 1.
    """
    _check(vs, gs, dim)
    if not vs:
        return [], []
    _, norms, scales = _op(list(vs), list(gs), dim, False)
    return list(norms), list(scales)
