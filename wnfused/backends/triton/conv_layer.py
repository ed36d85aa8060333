"""The convolution in one or two spatial dims on its own kernels: the host's side of ``kernels.conv``. Rows along dim 0.

Maps are NHWC inside, which channels_last tensors are already; others are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends.epilogue import mask_of, masked
from wnfused.backends.triton import configurations, rows, vendor
from wnfused.backends.triton.configurations import Tile
from wnfused.backends.triton.kernels import conv as kernels
from wnfused.backends.triton.linear_layer import Gradients, direction, split
from wnfused.backends.triton.support import blocks, input_precision, launch, precision


@dataclass(frozen=True)
class Geometry:
    """One convolution without groups: sizes of its maps, and the kernel's place on them."""

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    out_height: int
    out_width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(
        cls, x: Tensor, v: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> Geometry:
        """Of ``x [N, C, H, W]`` and ``v [F, C, kh, kw]``."""
        sizes = zip(x.shape[2:], v.shape[2:], stride, padding, dilation, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = v.shape[2:], stride, padding, dilation
        batch, channels, height, width = x.shape
        return cls(
            batch, channels, height, width, v.shape[0], out[0], out[1], (kh, kw), (sh, sw), (ph, pw), (dh, dw)
        )  # fmt: skip

    @property
    def pixels_in(self) -> int:
        return self.batch * self.height * self.width

    @property
    def pixels_out(self) -> int:
        return self.batch * self.out_height * self.out_width

    @property
    def length(self) -> int:
        """Entries of a row of ``v``."""
        return self.channels * math.prod(self.kernel)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.channels, self.height, self.width, self.filters, self.out_height, self.out_width

    @property
    def constants(self) -> dict[str, int]:
        pairs = {"K": self.kernel, "S": self.stride, "P": self.padding, "D": self.dilation}
        return {f"{name}{axis}": n for name, pair in pairs.items() for axis, n in zip("HW", pair, strict=True)}


def weight_strides(v: Tensor) -> tuple[int, int]:
    """Steps in memory from channel to channel and from tap to tap of a dense ``v``."""
    taps = v.shape[2] * v.shape[3]
    return (taps, 1) if v.is_contiguous() else (1, v.shape[1])


def nhwc(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _constants(geometry: Geometry, activation: str, element: str) -> dict[str, Any]:
    """Of any of the kernels."""
    number = reference.ACTIVATIONS.index(activation)
    return {"ACTIVATION": number, "PRECISION": input_precision(element), **geometry.constants}


def convolve(
    x: Tensor, v: Tensor, norm: Tensor | None, g: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    y: Tensor, geometry: Geometry, activation: str, slope: float, factor: float = 1.0,
) -> None:  # fmt: skip
    """Writes ``y = factor act(s conv(x, v) + bias + residual)``.

    With ``norm`` given, it is written and ``s = g / norm``; without, ``v`` is the effective weight. Maps are NHWC in
    memory, whatever their shape says; ``v`` is dense.
    """
    element = precision(x.dtype, "conv")
    operands = (x, v, g, bias, residual, y, norm)
    constants = {"FUSED_NORM": norm is not None, **_constants(geometry, activation, element)}

    def run(tile: Tile) -> None:
        launch(
            kernels.forward,
            (blocks(geometry.pixels_out, tile.m), blocks(geometry.filters, tile.n)),
            (*operands, geometry.pixels_out, *geometry.sizes, *weight_strides(v), slope, factor),
            **constants,
            **tile.meta,
        )

    sizes = geometry.pixels_out, geometry.filters, geometry.length
    configurations.run("conv.forward", element, sizes, operands, constants, run)


def input_gradient(
    dy: Tensor, y: Tensor, v: Tensor, norm: Tensor | None, g: Tensor | None, dx: Tensor, geometry: Geometry,
    activation: str = "none", slope: float = 0.0, operand: Tensor | None = None, residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes ``dx``: the gradient, masked where ``operand``, a map behind a ReLU, is 0, plus ``residual``."""
    element = precision(dy.dtype, "conv")
    operands = (dy, y, v, g, norm, operand, residual, dx)
    constants = {"SCALED": norm is not None, **_constants(geometry, activation, element)}

    def run(tile: Tile) -> None:
        launch(
            kernels.input_gradient,
            (blocks(geometry.pixels_in, tile.m), blocks(geometry.channels, tile.n)),
            (*operands, geometry.pixels_in, *geometry.sizes, *weight_strides(v), slope),
            **constants,
            **tile.meta,
        )

    sizes = geometry.pixels_in, geometry.channels, geometry.filters * math.prod(geometry.kernel)
    configurations.run("conv.input_gradient", element, sizes, operands, constants, run)


def weight_gradient(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, bias: bool, geometry: Geometry,
    activation: str = "none", slope: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``(dv, dg, db)``: split over pixels, summed in a fixed order, taken through the weight norm."""
    element = precision(x.dtype, "conv")
    pixels = geometry.pixels_out
    operands, constants = (dy, y, x, v), _constants(geometry, activation, element)

    def run(tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        k_tiles = blocks(geometry.length, tile.k)
        tiles = blocks(geometry.filters, tile.n) * k_tiles
        workspace, span = split(v, pixels, tiles, k_tiles, tile.m, bias)
        launch(
            kernels.weight_gradient,
            (tiles, workspace[0].shape[0]),
            (*operands, *workspace, pixels, *geometry.sizes, *weight_strides(v), span, slope),
            **constants,
            **tile.meta,
        )
        return rows.summed_weight_gradient(*workspace, v, g, norm)

    sizes = pixels, geometry.filters, geometry.length
    return configurations.run("conv.weight_gradient", element, sizes, operands, {**constants, "bias": bias}, run)


# --------------------------------------------------------------------------------------------------- the layer


def forward(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], activation: str, slope: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    geometry = Geometry.of(x, v, stride, padding, dilation)
    weight, known = direction(x, rows.dense(v), g)
    norm = v.new_empty([geometry.filters], dtype=torch.float32) if known is None else known
    shape = [geometry.batch, geometry.filters, geometry.out_height, geometry.out_width]
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    if y.numel() == 0:
        return y, rows.row_norm(v)
    b = None if bias is None else rows.flat(bias)
    r = None if residual is None else nhwc(residual)
    fused = norm if known is None else None
    convolve(nhwc(x), weight, fused, rows.flat(g), b, r, y, geometry, activation, slope)
    return y, norm


def backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: Sequence[bool],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], activation: str, slope: float,
) -> Gradients:  # fmt: skip
    geometry = Geometry.of(x, v, stride, padding, dilation)
    dx, dv, dg, db, dz = (dy.new_empty(0) for _ in range(5))
    activation = mask_of(activation, slope)
    if needs[3] and activation != "none":  # the masked gradient is wanted anyway: take it once
        dy = dz = masked(dy, y, activation, slope)
        activation = "none"
    dy, v = nhwc(dy), rows.dense(v)
    y = dy if activation == "none" else nhwc(y)
    if needs[0]:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        input_gradient(dy, y, v, norm, rows.flat(g), dx, geometry, activation, slope)
    if needs[1]:
        dv, dg, found = weight_gradient(dy, y, nhwc(x), v, g, norm, needs[2], geometry, activation, slope)
        db = db if found is None else found
    elif needs[2]:
        db = vendor.bias_gradient(masked(dy, y, activation, slope), v)
    return dx, dv, dg, db, dz


def as_two_dims(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a convolution in one spatial dim as those of one in two, of height 1."""
    widened: list[Any] = [a.unsqueeze(2) if isinstance(a, Tensor) and a.dim() == 3 else a for a in arguments]
    return widened
