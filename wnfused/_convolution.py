"""torch's convolution and its derivatives, where oneDNN's are right, and in float64 where they are not."""

from __future__ import annotations

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
    wrong = _is_unwritten(x, w, *geometry[:-1]) or (recorded and _is_misled(x, stride, dilation, transposed))
    if not wrong:
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
    if not (_is_unwritten(x, w, *geometry[:-1]) or (needs[1] and _is_misled(x, stride, dilation, transposed))):
        found: Sequence[Tensor] = backward(dz, x, w, bias_sizes, *geometry, needs)
        return found
    wider = backward(dz.double(), x.double(), w.double(), bias_sizes, *geometry, needs)
    return [t.to(x.dtype) if needed else t for t, needed in zip(wider, needs, strict=True)]


def _is_wide_or_traced(x: Tensor) -> bool:
    return not x.is_cpu or x.dtype == torch.float64 or torch.compiler.is_compiling()


def _is_misled(x: Tensor, stride: Sequence[int], dilation: Sequence[int], transposed: bool) -> bool:
    """Whether the weight gradient is wrong, by oneDNN 3.x on a CPU (torch 2.13)."""
    return transposed and max(stride) > 1 and max(dilation) > 1 and not _is_wide_or_traced(x)


def _is_unwritten(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int],
) -> bool:  # fmt: skip
    """Whether results may be unwritten memory, or the process crash, by the same library.

    That is so in bfloat16 where one of a kernel's taps meets nothing but padding, and over three dims where no window
    lies within the depth or its padding is more than half of a window, too. (``conv_vendor.cpp`` asks the same of its
    own calls.)
    """
    if x.dtype != torch.bfloat16 or _is_wide_or_traced(x):
        return False
    extents = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding, strict=True)
    for dim, (size, taps, s, p, d, extra) in enumerate(extents):
        reach, inside = (taps - 1) * d, -(-p // s)  # the first window that begins within
        count = (size + 2 * p - reach - 1) // s + 1
        if transposed:  # x are the windows of y
            count, size = size, (size - 1) * s - 2 * p + reach + extra + 1
        if w.dim() == 5 and dim == 0 and (inside >= count or inside * s - p + reach >= size or 2 * p > reach):
            return True
        for shift in range(-p, taps * d - p, d):
            first = max(0, -(shift // s))  # the window in which the tap is past the padding before
            if first >= count or first * s + shift >= size:
                return True
    return False
