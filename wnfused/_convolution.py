"""torch's convolution and its derivatives, where oneDNN's are right, and in float64 where they are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """``torch.convolution``, whose derivatives are right whoever asks for them."""
    w = w.contiguous() if transposed and groups > 1 else w  # oneDNN misreads such weights in other formats
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    y = torch.convolution(x, w, bias, *geometry)
    # Whoever differentiates this takes torch's own derivative of it.
    recorded = torch.is_grad_enabled() and torch._C._get_tracing_state() is None
    if recorded and _misleads(x, y, w, stride, padding, dilation, transposed):
        wider = None if bias is None else bias.double()
        y = torch.convolution(x.double(), w.double(), wider, *geometry).to(y.dtype)
    return y


def convolution_backward(
    dz: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, needs: list[bool],
) -> Sequence[Tensor]:  # fmt: skip
    """torch's ``(dx, dw, db)``, a weight gradient that it would get wrong in float64."""
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    backward = torch.ops.aten.convolution_backward
    if not (needs[1] and _misleads(x, dz, w, stride, padding, dilation, transposed)):
        found: Sequence[Tensor] = backward(dz, x, w, bias_sizes, *geometry, needs)
        return found
    dx, _, db = backward(dz, x, w, bias_sizes, *geometry, [needs[0], False, needs[2]])
    dw = backward(dz.double(), x.double(), w.double(), bias_sizes, *geometry, [False, True, False])[1]
    return dx, dw.to(w.dtype), db


def _misleads(
    x: Tensor, y: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool,
) -> bool:  # fmt: skip
    """Whether torch's weight gradient is wrong, by oneDNN 3.x on a CPU (torch 2.13).

    So are those of transposed convolutions with a stride and a dilation above 1. In bfloat16 they are unwritten memory
    where one of a kernel's taps meets nothing but padding, and over three dims where no window lies within the depth or
    its padding is more than half of a window, too. (``conv_vendor.cpp`` asks the same of its own calls.)
    """
    if not x.is_cpu or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    if transposed and max(stride) > 1 and max(dilation) > 1:
        return True
    if x.dtype != torch.bfloat16:
        return False
    read, windows = (y, x) if transposed else (x, y)
    extents = zip(read.shape[2:], windows.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    for dim, (size, count, taps, s, p, d) in enumerate(extents):
        reach, inside = (taps - 1) * d, -(-p // s)  # the first window that begins within
        if w.dim() == 5 and dim == 0 and (inside >= count or inside * s - p + reach >= size or 2 * p > reach):
            return True
        for shift in range(-p, taps * d - p, d):
            first = max(0, -(shift // s))  # the window in which the tap is past the padding before
            if first >= count or first * s + shift >= size:
                return True
    return False
