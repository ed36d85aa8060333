"""Layers that no kernel runs whole, composed of the row norm, the vendor's product and an epilogue.

float64, float16, and norms along another dim. Where a convolution differs from what the kernels run in its norm alone
(the positional one of wav2vec 2.0: one norm a tap), they take the weight as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wnfused import reference
from wnfused._convolution import convolution, convolution_backward, reads_behind_rows
from wnfused.backends.asked import bits_of, given
from wnfused.backends.epilogue import epilogue_, masked
from wnfused.backends.native_norm import weight_norm, weight_norm_backward

ACTIVATION_NUMBERS = {name: number for number, name in enumerate(reference.ACTIVATIONS)}
"""The kernels' numbers of the activations."""


def effective_weight(v: Tensor, g: Tensor, dim: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w, norm = weight_norm(v, g, dim)
    return w.to(dtype), norm


def _weight_of_norm(v: Tensor, g: Tensor, norm: Tensor, dim: int | None) -> Tensor:
    """The same weight once more, in the dtype of ``v``, from the norms that the forward has found."""
    shape = [1] * v.dim()
    if dim is not None:
        shape[dim] = -1
    return (v * reference.row_scale(g, norm).reshape(shape)).to(v.dtype)


def linear(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    w, norm = effective_weight(v, g, dim, x.dtype)
    wide = torch.float32 if reads_behind_rows(x, x.dtype) else x.dtype
    y = torch.nn.functional.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
    return epilogue_(y, residual, activation, negative_slope), norm


def linear_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool],
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dz = masked(dy, y, activation, negative_slope)
    rows = dz.reshape(dz.shape[:-1].numel(), dz.shape[-1])  # -1 is ambiguous where there are no entries
    dx, dv, dg, db = (dy.new_empty(0) for _ in range(4))
    if needs[0]:
        dx = dz @ _weight_of_norm(v, g, norm, dim).to(x.dtype)
    if needs[1]:
        dv, dg = weight_norm_backward(rows.T @ x.reshape(rows.shape[0], x.shape[-1]), v, g, norm, dim)
    if needs[2]:
        db = rows.sum(0, dtype=reference.wide(dy.dtype)).to(v.dtype)
    return dx, dv, dg, db, dz if needs[3] and dz is not dy else dy.new_empty(0)


def _window(
    transposed: bool, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    output_padding: Sequence[int], groups: int, activation: str, negative_slope: float,
) -> tuple[Any, ...]:  # fmt: skip
    extra = (output_padding,) if transposed else ()
    return stride, padding, dilation, *extra, groups, ACTIVATION_NUMBERS[activation], negative_slope


def conv(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    w, norm = weight_norm(v, g, dim)
    w = w.contiguous(memory_format=reference.suggest_memory_format(v))  # which the format of y follows
    window = _window(transposed, stride, padding, dilation, output_padding, groups, activation, negative_slope)
    native = torch.ops.wnfused_native
    op = native.plain_conv_transpose if transposed else native.plain_conv
    found = op.default(x, w, bias, residual, *window)
    if found is not None:
        return found, norm
    b = None if bias is None else bias.to(x.dtype)
    y = convolution(x, w.to(x.dtype), b, stride, padding, dilation, transposed, output_padding, groups)
    return epilogue_(y, residual, activation, negative_slope), norm


def conv_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = _weight_of_norm(v, g, norm, dim) if needs[0] else v  # whose shape alone the others read
    window = _window(transposed, stride, padding, dilation, output_padding, groups, activation, negative_slope)
    native = torch.ops.wnfused_native
    op = native.plain_conv_transpose_backward if transposed else native.plain_conv_backward
    done, *found = op.default(dy, y, x, w, bits_of(needs), *window)
    if done:
        dx, dw, db, dz = given(found, dy)
        dv, dg = weight_norm_backward(dw, v, g, norm, dim) if needs[1] else (dw, dy.new_empty(0))
        return dx, dv, dg, db, dz
    dz = masked(dy, y, activation, negative_slope)
    features = w.shape[1] * groups if transposed else w.shape[0]
    gradients = convolution_backward(
        dz, x, w.to(x.dtype), [features], stride, padding, dilation, transposed, output_padding, groups, needs[:3]
    )
    dx, dw, db = given(gradients, dy)
    dv, dg = weight_norm_backward(dw, v, g, norm, dim) if needs[1] else (dy.new_empty(0), dy.new_empty(0))
    db = db.to(v.dtype) if needs[2] else db
    return dx, dv, dg, db, dz if needs[3] and dz is not dy else dy.new_empty(0)
