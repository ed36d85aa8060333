"""torch's convolution and its derivatives, where oneDNN's are right, and in float64 where they are not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """``torch.convolution``, right as it is and differentiated, whoever asks for the derivatives."""
    w = w.contiguous() if transposed and groups > 1 else w  # oneDNN misreads such weights in other formats
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    # Whoever differentiates this takes torch's own derivative of it.
    recorded = torch.is_grad_enabled() and torch._C._get_tracing_state() is None
    wrong = _is_unwritten(x, w, *geometry[:-1])
    # A transposed convolution is the data gradient of another.
    backwards = (recorded or transposed) and _backward_is_wrong(x, w, stride, dilation, transposed, groups, recorded)
    if not (wrong or backwards):
        return torch.convolution(x, w, bias, *geometry)
    y = torch.convolution(x.double(), w.double(), None if bias is None else bias.double(), *geometry)
    return y.to(x.dtype)


def convolution_backward(
    dz: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, needs: list[bool],
) -> Sequence[Tensor]:  # fmt: skip
    """torch's ``(dx, dw, db)``, in float64 where it would get them wrong."""
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    backward = torch.ops.aten.convolution_backward
    wrong = _backward_is_wrong(x, w, stride, dilation, transposed, groups, needs[1])
    if not (wrong or _is_unwritten(x, w, *geometry[:-1])):
        found: Sequence[Tensor] = backward(dz, x, w, bias_sizes, *geometry, needs)
        return found
    wider = backward(dz.double(), x.double(), w.double(), bias_sizes, *geometry, needs)
    return [t.to(x.dtype) if needed else t for t, needed in zip(wider, needs, strict=True)]


def _is_wide_or_traced(x: Tensor) -> bool:
    return not x.is_cpu or x.dtype == torch.float64 or torch.compiler.is_compiling()


def _backward_is_wrong(
    x: Tensor, w: Tensor, stride: Sequence[int], dilation: Sequence[int], transposed: bool, groups: int, weight: bool
) -> bool:
    """Whether the backward alone is wrong, by oneDNN 3.x on a CPU (torch 2.13); ``weight``: that gradient is asked for.

    In bfloat16 a kernel of a single tap with a stride writes beyond its memory for fewer than 16 channels. Weight
    gradients are wrong in transposed convolutions with a stride and a dilation, and of groups in bfloat16 with a
    dilation.
    """
    if _is_wide_or_traced(x):
        return False
    half, strided, dilated = x.dtype == torch.bfloat16, max(stride) > 1, max(dilation) > 1
    if half and strided and w.shape[1] < 16 and math.prod(w.shape[2:]) == 1:
        return True
    return weight and dilated and ((transposed and strided) or (half and groups > 1))


def _is_unwritten(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int],
) -> bool:  # fmt: skip
    """Whether results may be unwritten memory, or the process crash, by the same library.

    That is so in bfloat16 where one of a kernel's taps meets nothing but padding; over three dims where no window lies
    within the depth or its padding is more than half of a window; and where groups of one channel have several outputs,
    one column wide, with a stride along it. In float32 over three dims where both hold of the depth, and there is a
    stride along it. (``conv_vendor.cpp`` asks the same of its own calls.)
    """
    half = x.dtype == torch.bfloat16
    if not (half or w.dim() == 5) or _is_wide_or_traced(x):
        return False
    extents = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding, strict=True)
    if min(stride) < 1:  # torch refuses it
        return False
    for dim, (size, taps, s, p, d, extra) in enumerate(extents):
        reach, inside = (taps - 1) * d, -(-p // s)  # the first window that begins within
        count = (size + 2 * p - reach - 1) // s + 1
        if transposed:  # x are the windows of y
            count, size = size, (size - 1) * s - 2 * p + reach + extra + 1
        if w.dim() == 5 and dim == 0:
            beyond, deep = inside >= count or inside * s - p + reach >= size, 2 * p > reach
            if (beyond or deep) if half else (beyond and deep and s > 1):
                return True
        if not half:
            return False
        if dim == w.dim() - 3 and w.shape[1] == 1 and count == 1 and s > 1:
            return True
        for shift in range(-p, taps * d - p, d):
            first = max(0, -(shift // s))  # the window in which the tap is past the padding before
            if first >= count or first * s + shift >= size:
                return True
    return False
