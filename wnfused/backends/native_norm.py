"""The C++ backend's weight norm, alone and of many tensors in one call: thin shells of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends import native_cuda


def dense_rows(v: Tensor, dim: int | None) -> Tensor:
    """``v`` as the kernel reads it: contiguous, or for rows along dim 0 also channels_last, where a row is one run."""
    if v.is_contiguous():
        return v
    if dim == 0 and v.dim() == 4:
        _, channels, height, width = v.shape
        # torch's own answer looks past the strides of dims of one entry, by which the kernel steps.
        if v.stride() == (height * width * channels, 1, width * channels, channels):
            return v
    return v.contiguous()


def laid_out_like(dw: Tensor, v: Tensor) -> Tensor:
    """``dw`` in the memory and dtype of ``v``."""
    return dw if dw.stride() == v.stride() and dw.dtype == v.dtype else torch.empty_like(v).copy_(dw)


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    dim = None if dim is None else dim % v.dim()
    if v.is_cuda:
        return native_cuda.weight_norm(dense_rows(v, dim), g, dim)
    return torch.ops.wnfused_native.weight_norm(v, g, -1 if dim is None else dim)


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    dim = None if dim is None else dim % v.dim()
    if v.is_cuda:
        v = dense_rows(v, dim)
        return native_cuda.weight_norm_backward(laid_out_like(dw, v), v, g, norm, dim)
    return torch.ops.wnfused_native.weight_norm_backward(dw, v, g, norm, -1 if dim is None else dim)


Tensors = Sequence[Tensor]


def weight_norm_many(
    v: Tensors, g: Tensors, dim: int | None = 0, weights: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if dim is not None and dim < 0:  # another dim of each tensor: one by one
        found = [weight_norm(*tensors, dim) for tensors in zip(v, g, strict=True)]
        norm = [n for _, n in found]
        return [w for w, _ in found] if weights else [], norm, list(map(reference.row_scale, g, norm))
    return torch.ops.wnfused_native.weight_norm_many(v, g, -1 if dim is None else dim, weights)


def weight_norm_many_backward(
    dw: Tensors, v: Tensors, g: Tensors, norm: Tensors, dim: int | None = 0
) -> tuple[list[Tensor], list[Tensor]]:
    if dim is not None and dim < 0:
        found = [weight_norm_backward(*tensors, dim) for tensors in zip(dw, v, g, norm, strict=True)]
        return [dv for dv, _ in found], [dg for _, dg in found]
    return torch.ops.wnfused_native.weight_norm_many_backward(dw, v, g, norm, -1 if dim is None else dim)
