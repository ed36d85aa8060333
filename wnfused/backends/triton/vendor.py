"""The layer on the vendor's product: the weight is scaled once, the product is cuBLAS's or cuDNN's, with the bias.

Residual and activation follow in place, or ride in the product where ``strategy.use_vendor_epilogues`` says so. Where a
product is large enough to run at the vendor's rate, the pass over ``v`` that scales it is small beside it, and nothing
of ours can gain what the vendor's kernels have over ours. It takes everything that torch's own layers take: groups,
three spatial dims, transposed convolutions, norms along any dim. What most layers are, normalised along dim 0 and not
transposed, ``csrc/autograd/vendor.cpp`` does in fewer launches, at less of the host's time; there linear layers of few
samples are kernels of their own, unless ``strategy.forced`` asks for this way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wnfused.backends import native_autograd, native_cuda
from wnfused.backends.asked import bits_of, given
from wnfused.backends.epilogue import epilogue_, masked
from wnfused.backends.triton import strategy
from wnfused.backends.triton.rows import effective_weight, weight_norm_backward
from wnfused.reference import ACTIVATIONS

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def bias_gradient(dz: Tensor, v: Tensor) -> Tensor:
    """``dz [..., F]``, or ``[N, F, *spatial]`` for a weight of more than two dims."""
    spans = list(range(dz.dim() - 1)) if v.dim() == 2 else [0, *range(2, dz.dim())]
    return dz.sum(spans, dtype=torch.float32).to(v.dtype)


def _in_cpp(x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, dim: int | None) -> bool:
    along_rows = dim is not None and dim % v.dim() == 0
    return along_rows and not strategy.vendor_epilogues() and native_cuda.takes_layer(x.dtype, x, v, g, bias)


def linear(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, dim: int | None, activation: str,
    slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if _in_cpp(x, v, g, bias, dim):
        found: tuple[Tensor, Tensor] = torch.ops.wnfused_native.linear(
            x, v, g, bias, residual, ACTIVATIONS.index(activation), slope
        )
        return found
    w, norm = effective_weight(v, g, dim, x.dtype)
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty([x.shape[:-1].numel(), x.shape[-1]])
    if bias is None:
        y = flat @ w.T
    elif strategy.vendor_epilogues() and activation == "relu" and residual is None and flat.numel():
        y = torch._addmm_activation(bias.to(x.dtype), flat, w.T)
        return y.reshape([*x.shape[:-1], w.shape[0]]), norm
    else:
        y = torch.addmm(bias.to(x.dtype), flat, w.T)
    return epilogue_(y.reshape([*x.shape[:-1], w.shape[0]]), residual, activation, slope), norm


def linear_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: Sequence[bool], dim: int | None,
    activation: str, slope: float,
) -> Gradients:  # fmt: skip
    if _in_cpp(x, v, g, None, dim):
        found = torch.ops.wnfused_native.linear_backward(
            dy, y, x, v, g, norm, bits_of(needs), ACTIVATIONS.index(activation), slope
        )
        return given(found, dy)
    dz = masked(dy, y, activation, slope)
    flat = dz.reshape(dz.shape[:-1].numel(), dz.shape[-1])
    dx, dv, dg, db = (dy.new_empty(0) for _ in range(4))
    if needs[0]:
        dx = (flat @ effective_weight(v, g, dim, x.dtype)[0]).reshape(x.shape)
    if needs[1]:
        dw = flat.T @ x.reshape(flat.shape[0], x.shape[-1])
        dv, dg = weight_norm_backward(dw, v, g, norm, dim)
    if needs[2]:
        db = bias_gradient(flat, v)
    return dx, dv, dg, db, dz if needs[3] and dz is not dy else dy.new_empty(0)


Geometry = tuple[list[int], list[int], list[int], bool, list[int], int]
"""``stride, padding, dilation, transposed, output_padding, groups``."""


_asked = 0
_is_ours = False
_lock = threading.Lock()


def _ask_for_deterministic(on: bool) -> None:
    """As the op of that name does where the C++ library is: there one count serves both."""
    global _asked, _is_ours
    with _lock:
        if on and _asked == 0 and not torch._C._get_cudnn_deterministic():
            torch._C._set_cudnn_deterministic(True)
            _is_ours = True
        _asked += 1 if on else -1
        if _asked == 0 and _is_ours:
            torch._C._set_cudnn_deterministic(False)
            _is_ours = False


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """cuDNN's deterministic algorithms: some of its backward kernels add with atomics otherwise.

    torch has one flag for all threads, and a backward has a thread to each device: the first in sets it, the last out
    restores it. Past ``torch.backends``, whose flags ``torch.backends.disable_global_flags`` closes to everybody.
    """
    in_cpp = native_autograd.unavailable() is None
    ask = torch.ops.wnfused_autograd.ask_for_deterministic.default._op if in_cpp else _ask_for_deterministic
    ask(True)
    try:
        yield
    finally:
        ask(False)


def _has_fused_epilogue(x: Tensor, v: Tensor, geometry: Geometry, activation: str) -> bool:
    """Whether cuDNN's own convolution + bias (+ residual) + ReLU is wanted and takes it."""
    if not strategy.vendor_epilogues():
        return False
    transposed, groups = geometry[3], geometry[5]
    plain = v.dim() == 4 and not transposed and groups == 1 and x.numel() > 0
    # Its fused engines want channels in multiples of 8.
    aligned = v.shape[0] % 8 == 0 and v.shape[1] % 8 == 0
    return activation == "relu" and x.is_cuda and torch.backends.cudnn.enabled and plain and aligned


def conv(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry,
    dim: int | None, activation: str, slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    stride, padding, dilation, transposed, _, groups = geometry
    if not transposed and _in_cpp(x, v, g, bias, dim):
        found: tuple[Tensor, Tensor] = torch.ops.wnfused_native.conv(
            x, v, g, bias, residual, stride, padding, dilation, groups, ACTIVATIONS.index(activation), slope
        )
        return found
    w, norm = effective_weight(v, g, dim, x.dtype)
    b = None if bias is None else bias.to(x.dtype)
    with _deterministic():
        if _has_fused_epilogue(x, v, geometry, activation):
            if residual is None:
                return torch.cudnn_convolution_relu(x, w, b, stride, padding, dilation, groups), norm
            y = torch.cudnn_convolution_add_relu(x, w, residual, 1.0, b, stride, padding, dilation, groups)
            return y, norm
        y = torch.convolution(x, w, b, *geometry)
    return epilogue_(y, residual, activation, slope), norm


def conv_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: Sequence[bool], geometry: Geometry,
    dim: int | None, activation: str, slope: float,
) -> Gradients:  # fmt: skip
    stride, padding, dilation, transposed, _, groups = geometry
    if not transposed and _in_cpp(x, v, g, None, dim):
        found = torch.ops.wnfused_native.conv_backward(
            dy, y, x, v, g, norm, bits_of(needs), stride, padding, dilation, groups, ACTIVATIONS.index(activation),
            slope,
        )  # fmt: skip
        return given(found, dy)
    dz = masked(dy, y, activation, slope)
    dx, dv, dg, db = (dy.new_empty(0) for _ in range(4))
    if needs[0] or needs[1]:
        w, _ = effective_weight(v, g, dim, x.dtype)
        with _deterministic():
            gradients = torch.ops.aten.convolution_backward(
                dz, x, w, None, *geometry, [needs[0], needs[1], False]
            )  # fmt: skip
        if needs[0]:
            dx = gradients[0]
        if needs[1]:
            dv, dg = weight_norm_backward(gradients[1], v, g, norm, dim)
    if needs[2]:
        db = bias_gradient(dz, v)
    return dx, dv, dg, db, dz if needs[3] and dz is not dy else dy.new_empty(0)
