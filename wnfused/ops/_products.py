"""Ops as torch's own product with the effective weight: under the transforms of ``torch.func``, which no kernel's
backward knows, and stages in float64, which no kernel has. All else is recorded as of plain layers.

What costs in the reference is the norm: a dozen small ops, each of which goes through every level of the transforms.
Here it is one op of ``csrc/autograd/weight.cpp`` where it can be. (``csrc/autograd/composed_layer.cpp`` is the same of
layers, for the fast path.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from wnfused import dispatch, reference
from wnfused.backends import native_autograd

_WHOLE = -1  # in the place of a dim of v: one norm for all of it
_DTYPES = (torch.float32, torch.float64)


def weight_norm(v: Tensor, g: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """As the reference has it."""
    if not has_op(v, g):
        return reference.weight_norm(v, g, dim)
    w, norm = torch.ops.wnfused_autograd.weight.default._op(v, g, _WHOLE if dim is None else dim % v.dim())
    return w, norm


def linear(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, dim: int | None, activation: str,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the reference has it."""
    w, norm = _rounded(v, g, dim, x)
    return reference.linear_of_weight(x, w, bias, residual, activation, negative_slope), norm


def conv(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None, activation: str, negative_slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the reference has it."""
    w, norm = _rounded(v, g, dim, x)
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    return reference.conv_of_weight(x, w, bias, residual, *geometry, activation, negative_slope), norm


def residual_stage(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, recompute: int, save: bool
) -> tuple[Tensor]:
    """``y`` as the reference has it, with all norms taken at once; nothing is kept for the backward of a kernel."""
    dtype = reference.wide(x.dtype)
    found = weight_norm(reference.cast(v, dtype).flatten(0, 2), g.flatten(), 0)[0]
    w = reference.cast(reference.cast(found, x.dtype), dtype).unflatten(0, (2 * v.shape[0], v.shape[2])).unbind()
    b = bias.flatten(0, 1).unbind()
    h = reference.cast(x, dtype)
    for i in range(0, len(w), 2):
        h = reference.block_of_weights(h, w[i : i + 2], b[i : i + 2], skip_scale, x.dtype)[0]
    return (reference.cast(h, x.dtype) if v.shape[0] else x.clone(),)


def _rounded(v: Tensor, g: Tensor, dim: int | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weight, made in the wider of the parameters' and the operands' dtypes, in the operands'."""
    w, norm = weight_norm(reference.cast(v, reference.wide(v.dtype)), g, dim)
    return reference.cast(w, x.dtype), norm


def has_op(v: Tensor, g: Tensor) -> bool:
    """Whether the weight is an op: in dtypes of its kernels, and where no mode looks on that knows only torch's own."""
    return (
        v.device.type == "cpu"
        and v.dtype in _DTYPES
        and v.dtype == g.dtype
        and v.numel() > 0
        and not torch._C._len_torch_dispatch_stack()
        and dispatch.prefers_native()
        and native_autograd.unavailable() is None
    )
