"""torch's convolution and its derivatives, where oneDNN's are right, and in float64 where they are not; and where its
linear layers are not."""

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
    x, w = _readable(x, w, transposed, groups)
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    if not vendor_is_wrong(x, w, *geometry, x.dtype):
        return torch.convolution(x, w, bias, *geometry)
    y = torch.convolution(x.double(), w.double(), None if bias is None else bias.double(), *geometry)
    return y.to(x.dtype)


def vendor_is_wrong(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether ``torch.convolution`` in ``dtype``, or what autograd records of it here, is wrong."""
    if _is_wide_or_traced(x):
        return False
    recorded = torch.is_grad_enabled()  # whoever differentiates this takes torch's own derivative of it
    half = dtype == torch.bfloat16
    # A transposed convolution is the data gradient of another.
    if (recorded or transposed) and _backward_is_wrong(x, w, stride, dilation, transposed, groups, half, recorded):
        return True
    return _is_unwritten(x, w, stride, padding, dilation, transposed, output_padding, half, recorded)


def convolution_backward(
    dz: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, needs: list[bool],
) -> Sequence[Tensor]:  # fmt: skip
    """torch's ``(dx, dw, db)``, in float64 where it would get them wrong."""
    x, w = _readable(x, w, transposed, groups)
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    backward = torch.ops.aten.convolution_backward
    half = x.dtype == torch.bfloat16
    wrong = not _is_wide_or_traced(x) and (
        _backward_is_wrong(x, w, stride, dilation, transposed, groups, half, needs[1])
        or _is_unwritten(x, w, *geometry[:-1], half, True)
    )
    if not wrong:
        found: Sequence[Tensor] = backward(dz, x, w, bias_sizes, *geometry, needs)
        return found
    wider = backward(dz.double(), x.double(), w.double(), bias_sizes, *geometry, needs)
    return [t.to(x.dtype) if needed else t for t, needed in zip(wider, needs, strict=True)]


def reads_behind_rows(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a linear layer in ``dtype`` takes what stands behind the rows of ``x`` times zero, be it infinite: with
    AMX, oneDNN does where rows of bfloat16 are no whole depth of a tile. (``linear_routes.cpp`` asks the same of its
    own calls, which have more than 16 rows.)"""
    return dtype == torch.bfloat16 and x.is_cpu and x.shape[-1] % 32 != 0


def _readable(x: Tensor, w: Tensor, transposed: bool, groups: int) -> tuple[Tensor, Tensor]:
    """What is misread in channels_last, contiguous: weights of groups in transposed convolutions, by oneDNN; a single
    image cut out of others, ``x[0][None]``, before groups, by torch, which looks at the distance to the next one."""
    if groups == 1:
        return x, w
    cut_out = not _is_traced() and x.shape[0] == 1 and x.stride(0) != x.numel()
    return x.contiguous() if cut_out else x, w.contiguous() if transposed else w


def _suggests_channels_last(t: Tensor) -> bool:
    """As torch tells it of a map or a weight over two dims: by strides that grow in the order C, W, H, N. 1x1 weights,
    which are contiguous in every order, may have such.
    """
    least = 0
    for dim in (1, 3, 2, 0):
        if t.shape[dim] == 0 or t.stride(dim) < least or (dim == 0 and least == t.stride(1)):
            return False
        least = t.stride(dim) * t.shape[dim]
    return t.stride(1) != 0


def _is_traced() -> bool:
    """Whether sizes are not numbers: what is recorded serves others, and runs elsewhere."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _is_wide_or_traced(x: Tensor) -> bool:
    return not x.is_cpu or x.dtype == torch.float64 or _is_traced()


def _backward_is_wrong(
    x: Tensor, w: Tensor, stride: Sequence[int], dilation: Sequence[int], transposed: bool, groups: int, half: bool,
    weight: bool,
) -> bool:  # fmt: skip
    """Whether the backward alone is wrong, by oneDNN 3.x on a CPU (torch 2.13); ``weight``: that gradient is asked for.

    A kernel of a single tap with a stride writes beyond its memory for fewer than 16 channels: in bfloat16, and the
    weight gradient in float32 in channels_last over two dims. Weight gradients are wrong in transposed convolutions
    with a stride and a dilation; and in bfloat16 with a dilation, of groups, and in channels_last where the inputs (of
    a transposed one the outputs) are more than 16 and no multiple of that. (``vendor_product.cpp`` asks the same.)
    """
    strided, dilated = max(stride) > 1, max(dilation) > 1
    last = w.dim() == 4 and (_suggests_channels_last(x) or _suggests_channels_last(w))
    few = strided and w.shape[1] < 16 and math.prod(w.shape[2:]) == 1
    if few and (half or (weight and last)):
        return True
    if not weight or not dilated:
        return False
    ragged = last and w.shape[1] > 16 and w.shape[1] % 16 != 0
    return (transposed and strided) or (half and (groups > 1 or ragged))


def _is_unwritten(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], half: bool, backward: bool,
) -> bool:  # fmt: skip
    """Whether results may be unwritten memory, or the process crash, by the same library.

    That is so over three dims with a stride along the depth where no window lies within it; where groups of one channel
    are one column wide in the output, with a stride along it; and where a whole kernel meets nothing but padding. In
    bfloat16 it is so, too, where one of its taps does; where any output is one column wide, over two dims or three with
    a stride along it; and over three dims where no window lies within the depth, its padding is more than half of a
    window, or its last levels are behind every window: those of dx in a ``backward``, of y in a transposed convolution.
    (``vendor_product.cpp`` asks the same of its own calls.)
    """
    if min(*stride, *dilation) < 1:  # torch refuses it
        return False
    extents = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding, strict=True)
    for dim, (size, taps, s, p, d, extra) in enumerate(extents):
        reach, inside = (taps - 1) * d, -(-p // s)  # the first window that begins within
        count = (size + 2 * p - reach - 1) // s + 1
        if transposed:  # x are the windows of y
            count, size = size, (size - 1) * s - 2 * p + reach + extra + 1
        if w.dim() == 5 and dim == 0:
            beyond, deep = inside >= count or inside * s - p + reach >= size, 2 * p > reach
            unread = (backward or transposed) and (count - 1) * s - p + reach < size - 1
            if (beyond or deep or unread) if half else (beyond and s > 1):
                return True
        any_column = half and w.dim() > 3 and taps > 1
        if dim == w.dim() - 3 and (any_column or w.shape[1] == 1) and count == 1 and s > 1:
            return True
        missing = 0
        for shift in range(-p, taps * d - p, d):
            first = max(0, -(shift // s))  # the window in which the tap is past the padding before
            missing += first >= count or first * s + shift >= size
        if missing >= (1 if half else taps):
            return True
    return False
