"""The linear layer on its own kernels: the host's side of ``kernels.linear``. Rows along dim 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends.epilogue import mask_of, masked
from wnfused.backends.triton import configurations, rows, vendor
from wnfused.backends.triton.configurations import Tile
from wnfused.backends.triton.kernels import linear as kernels
from wnfused.backends.triton.support import blocks, input_precision, launch, precision

RECOMPUTE_UP_TO = 64
"""Up to this many rows of the batch the weight gradient's products are taken twice and need no workspace. Not for one
row: that is a constant to Triton, whose compiler fails on the loop over rows that it folds away (3.6.0 and 3.7.1)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def direction(x: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the forward kernel multiplies, and the norms if they are known already.

    The kernel rounds ``v`` to the operands' dtype and scales the product. Float16 has not the range of float32: there
    the weight is scaled first.
    """
    if x.dtype == torch.float16 and v.dtype == torch.float32:
        return rows.effective_weight(v, g, 0, x.dtype)
    return v, None


def _constants(activation: int, element: str) -> dict[str, Any]:
    """Of any of the kernels."""
    return {"ACTIVATION": activation, "PRECISION": input_precision(element)}


def forward(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, slope: float
) -> tuple[Tensor, Tensor]:
    N, K = v.shape
    M = math.prod(x.shape[:-1])
    flat = x.reshape(M, K)
    y = x.new_empty([*x.shape[:-1], N])
    if M == 0:
        return y, rows.row_norm(v)
    weight, known = direction(x, v, g)
    norm = v.new_empty([N], dtype=torch.float32) if known is None else known
    b = None if bias is None else rows.flat(bias)
    r = None if residual is None else residual.contiguous()
    element = precision(x.dtype, "matmul")
    operands = (flat, weight, rows.flat(g), b, r, y, norm)
    constants = {"FUSED_NORM": known is None, **_constants(reference.ACTIVATIONS.index(activation), element)}

    def run(tile: Tile) -> None:
        launch(
            kernels.forward,
            (blocks(M, tile.m) * blocks(N, tile.n),),
            (*operands, M, N, K, *flat.stride(), *weight.stride(), slope),
            **constants,
            **tile.meta,
        )

    configurations.run("linear.forward", element, (M, N, K), operands, constants, run)
    return y, norm


def backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: Sequence[bool], activation: str,
    slope: float,
) -> Gradients:  # fmt: skip
    N, K = v.shape
    M = math.prod(x.shape[:-1])
    dx, dv, dg, db, dz = (dy.new_empty(0) for _ in range(5))
    activation = mask_of(activation, slope)
    if needs[3] and activation != "none":  # the masked gradient is wanted anyway: take it once
        dy = dz = masked(dy, y, activation, slope)
        activation = "none"
    dy = dy.reshape(M, N).contiguous()
    y = dy if activation == "none" else y.reshape(M, N).contiguous()
    number = reference.ACTIVATIONS.index(activation)
    if needs[0]:
        dx = _input_gradient(dy, y, x, v, g, norm, number, slope)
    if needs[1]:
        flat, dense = x.reshape(M, K), v.contiguous()
        take = _recomputed if 1 < M <= RECOMPUTE_UP_TO else _split
        dv, dg, found = take(dy, y, flat, dense, g, norm, needs[2], number, slope)
        db = db if found is None else found
    elif needs[2]:
        db = vendor.bias_gradient(masked(dy, y, activation, slope), v)
    return dx, dv, dg, db, dz


def _input_gradient(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, activation: int, slope: float
) -> Tensor:
    (M, N), K = dy.shape, v.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    element = precision(x.dtype, "matmul")
    operands = (dy, y, v, rows.flat(g), norm, dx)
    constants = {"SCALED": True, **_constants(activation, element)}

    def run(tile: Tile) -> None:
        launch(
            kernels.input_gradient,
            (blocks(M, tile.m) * blocks(K, tile.n),),
            (*operands, M, N, K, *v.stride(), slope),
            **constants,
            **tile.meta,
        )

    configurations.run("linear.input_gradient", element, (M, K, N), operands, constants, run)
    return dx


def _recomputed(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, bias: bool, activation: int, slope: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    (M, N), K = dy.shape, v.shape[1]
    dv, dg = torch.empty_like(v), torch.empty(g.shape, dtype=g.dtype, device=g.device)
    db = v.new_empty([N]) if bias else None
    element = precision(x.dtype, "matmul")
    operands, constants = (dy, y, x, v, rows.flat(g), norm, dv, dg, db), _constants(activation, element)

    def run(tile: Tile) -> None:
        launch(
            kernels.weight_gradient_recomputed,
            (blocks(N, tile.n),),
            (*operands, M, N, K, *x.stride(), slope),
            **constants,
            **tile.meta,
        )

    configurations.run("linear.weight_gradient_recomputed", element, (M, N, K), operands, constants, run)
    return dv, dg, db


def _split(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, bias: bool, activation: int, slope: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    (M, N), K = dy.shape, v.shape[1]
    element = precision(x.dtype, "matmul")
    operands, constants = (dy, y, x, v), _constants(activation, element)

    def run(tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        k_tiles = max(blocks(K, tile.k), 1)
        tiles = blocks(N, tile.n) * k_tiles
        workspace, span = split(v, M, tiles, k_tiles, tile.m, bias)
        launch(
            kernels.weight_gradient,
            (tiles, workspace[0].shape[0]),
            (*operands, *workspace, M, N, K, *x.stride(), span, slope),
            **constants,
            **tile.meta,
        )
        return rows.summed_weight_gradient(*workspace, v, g, norm)

    return configurations.run("linear.weight_gradient", element, (M, N, K), operands, {**constants, "bias": bias}, run)


def split(
    v: Tensor, length: int, tiles: int, k_tiles: int, step: int, bias: bool
) -> tuple[tuple[Tensor, Tensor, Tensor | None], int]:
    """Workspace ``(parts, dots, biases)`` of a split weight gradient, and how much of the sum each part takes."""
    parts = configurations.splits(max(tiles, 1), length, step)
    span = blocks(blocks(length, parts), step) * step
    parts = max(blocks(length, span) if span else 1, 1)
    made = {"dtype": torch.float32, "device": v.device}
    workspace = (
        torch.empty([parts, v.shape[0], math.prod(v.shape[1:])], **made),  # type: ignore[call-overload]
        torch.empty([parts * k_tiles, v.shape[0]], **made),  # type: ignore[call-overload]
        torch.empty([parts, v.shape[0]], **made) if bias else None,  # type: ignore[call-overload]
    )
    return workspace, span
