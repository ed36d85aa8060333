"""The Triton backend: weight-normalised layers on NVIDIA GPUs of compute capability 8.0 and newer.

Row norms ride beside the product, gain, bias, residual and activation in its epilogue, the weight norm's backward in
the epilogue of the weight gradient; where the vendor's product is faster, the weight is scaled once for it
(``wnfused.backends.triton.strategy`` says which, and why). Sums are taken in float32, in an order that
depends on nothing but shapes, types and what is aligned to 16 bytes: no atomics, no timing.

    strategy        which way a layer goes              configurations, search   which tile a kernel runs in
    rows            norms, effective weight             linear_layer, conv_layer, vendor, stage   the layers
    kernels/        the device code                     support                  refusals, launches

``float32`` follows ``torch.backends`` between TF32 and full precision, as torch's own layers do. With
TRITON_INTERPRET=1 the same code runs in Python on CPU tensors, which is how it is tested; the offline gate compiles it
for every architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wnfused.backends.triton import support
from wnfused.backends.triton.strategy import Layer, way
from wnfused.backends.triton.support import unavailable

__all__ = ["refusal", "unavailable"]

# Importing the kernels takes triton, so each function here imports what it calls.

_OPS = (
    "conv", "conv_backward", "linear", "linear_backward", "residual_stage", "residual_stage_backward", "weight_norm",
    "weight_norm_backward", "weight_norm_many", "weight_norm_many_backward",
)  # fmt: skip


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    """Why it cannot run an op on these arguments, or None."""
    if op not in _OPS:
        return f"it has no kernel for {op}"
    return unavailable() or support.refusal(op, arguments) or support.too_large(op, arguments)


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    from wnfused.backends.triton import rows

    return rows.weight_norm(v, g, dim)


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    from wnfused.backends.triton import rows

    return rows.weight_norm_backward(dw, v, g, norm, dim)


def weight_norm_many(
    v: Sequence[Tensor], g: Sequence[Tensor], dim: int | None = 0, weights: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    from wnfused.backends.triton import rows

    return rows.weight_norm_many(v, g, dim, weights)


def weight_norm_many_backward(
    dw: Sequence[Tensor], v: Sequence[Tensor], g: Sequence[Tensor], norm: Sequence[Tensor], dim: int | None = 0
) -> tuple[list[Tensor], list[Tensor]]:
    from wnfused.backends.triton import rows

    return rows.weight_norm_many_backward(dw, v, g, norm, dim)


def _linear_layer(x: Tensor, v: Tensor, dim: int | None) -> Layer:
    dim = None if dim is None else dim % v.dim()
    full = support.precision(x.dtype, "matmul") == "ieee"
    return Layer(x.shape[:-1].numel(), v.shape[0], v.shape[1], dim, full=full)


def linear(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from wnfused.backends.triton import linear_layer, vendor

    if way(_linear_layer(x, v, dim)) == "fused":
        return linear_layer.forward(x, v, g, bias, residual, activation, negative_slope)
    return vendor.linear(x, v, g, bias, residual, dim, activation, negative_slope)


def linear_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool],
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from wnfused.backends.triton import linear_layer, vendor

    if way(_linear_layer(x, v, dim)) == "fused":
        return linear_layer.backward(dy, y, x, v, g, norm, needs, activation, negative_slope)
    return vendor.linear_backward(dy, y, x, v, g, norm, needs, dim, activation, negative_slope)


def _conv_layer(x: Tensor, v: Tensor, transposed: bool, groups: int, dim: int | None) -> Layer:
    dim = None if dim is None else dim % v.dim()
    return Layer(x.numel() // max(x.shape[1], 1), v.shape[0], v.shape[1], dim, v.dim() - 2, groups, transposed)


def conv(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from wnfused.backends.triton import conv_layer, vendor

    layer = _conv_layer(x, v, transposed, groups, dim)
    if way(layer) == "vendor":
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        return vendor.conv(x, v, g, bias, residual, geometry, dim, activation, negative_slope)
    if layer.spatial == 1:
        x2, v2, residual2 = conv_layer.as_two_dims((x, v, residual))
        geometry2 = [1, *stride], [0, *padding], [1, *dilation]
        y, norm = conv_layer.forward(x2, v2, g, bias, residual2, *geometry2, activation, negative_slope)
        return y.squeeze(2), norm
    return conv_layer.forward(x, v, g, bias, residual, stride, padding, dilation, activation, negative_slope)


def conv_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool], stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from wnfused.backends.triton import conv_layer, vendor

    layer = _conv_layer(x, v, transposed, groups, dim)
    if way(layer) == "vendor":
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        return vendor.conv_backward(dy, y, x, v, g, norm, needs, geometry, dim, activation, negative_slope)
    if layer.spatial == 1:
        dy, y, x, v = conv_layer.as_two_dims((dy, y, x, v))
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    dx, dv, dg, db, dz = conv_layer.backward(
        dy, y, x, v, g, norm, needs, stride, padding, dilation, activation, negative_slope
    )
    if layer.spatial == 1:
        dx, dv, dz = (t.squeeze(2) if t.dim() == 4 else t for t in (dx, dv, dz))
    return dx, dv, dg, db, dz


def residual_stage(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float = 1.0, recompute: int = 0, save: bool = True
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from wnfused.backends.triton import stage

    return stage.residual_stage(x, v, g, bias, skip_scale, recompute, save)


def residual_stage_backward(
    dy: Tensor, v: Tensor, g: Tensor, bias: Tensor, norm: Tensor, maps: Tensor, skip_scale: float = 1.0,
    recompute: int = 0, parameters: bool = True, signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from wnfused.backends.triton import stage

    return stage.residual_stage_backward(dy, v, g, bias, norm, maps, skip_scale, recompute, parameters)
