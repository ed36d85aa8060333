"""The residual stage, convolution by convolution, for widths and types that no whole-stage kernel takes.

All weights of the stage are scaled in one launch and rounded once. Each convolution's epilogue does the rest: bias and
ReLU; bias, the float32 residual stream and ``skip_scale``; on the way back the ReLU's mask, and the stream's gradient.
Operand maps are the rows of ``maps`` itself, NHWC, so nothing is copied to be kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wnfused.backends.triton import conv_layer as conv
from wnfused.backends.triton import rows
from wnfused.reference import empty_stage_maps, suggest_memory_format

_ONE = (1, 1)


def _effective_weights(v: Tensor, g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The effective weights ``[B, 2, C, C, 3, 3]`` in the operands' dtype, and the norms ``[B, 2, C]``."""
    w, norm = rows.effective_weight(v.flatten(0, 2), g.flatten(), 0, dtype)
    return w.reshape(v.shape), norm.reshape(g.shape)


def _geometry(x: Tensor, v: Tensor) -> conv.Geometry:
    return conv.Geometry.of(x, v[0, 0], _ONE, _ONE, _ONE) if v.shape[0] else _empty_geometry(x)


def _empty_geometry(x: Tensor) -> conv.Geometry:
    n, c, h, w = x.shape
    return conv.Geometry(n, c, h, w, c, h, w, (3, 3), _ONE, _ONE, _ONE)


class _Blocks:
    """The forward of single blocks on NHWC maps ``[N, H, W, C]``: ``h`` float32, operands in ``dtype``."""

    def __init__(self, w: Tensor, bias: Tensor, geometry: conv.Geometry, skip_scale: float) -> None:
        self.w, self.bias, self.geometry, self.skip_scale = w, bias, geometry, skip_scale

    def operands(self, b: int, h: Tensor, operand: Tensor, a: Tensor) -> None:
        """Writes ``operand = h`` and ``a = relu(conv_1(operand) + b_1)``."""
        operand.copy_(h)
        conv.convolve(operand, self.w[b, 0], None, None, self.bias[b, 0], None, a, self.geometry, "relu", 0.0)

    def close(self, b: int, h: Tensor, a: Tensor) -> Tensor:
        """``skip_scale (h + conv_2(a) + b_2)``."""
        after = torch.empty_like(h)
        arguments = (a, self.w[b, 1], None, None, self.bias[b, 1], h, after, self.geometry, "none", 0.0)
        conv.convolve(*arguments, factor=self.skip_scale)
        return after


def residual_stage(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, recompute: int, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = v.shape[0]
    w, norm = _effective_weights(v.contiguous(), g, x.dtype)
    maps = empty_stage_maps(x, blocks, recompute, save)
    stage = _Blocks(w, bias.contiguous(), _geometry(x, v), skip_scale)
    h = x.permute(0, 2, 3, 1).to(torch.float32).contiguous()
    scratch = torch.empty([2, *h.shape], dtype=x.dtype, device=x.device)
    for b in range(blocks):
        if save and recompute and b % recompute == 0:
            maps[b // recompute, 0].copy_(h)
        operand, a = maps[b] if save and not recompute else scratch
        stage.operands(b, h, operand, a)
        h = stage.close(b, h, a)
    y = torch.empty_like(x, memory_format=suggest_memory_format(x))
    y.copy_(h.permute(0, 3, 1, 2))
    return y, norm, maps


def residual_stage_backward(
    dy: Tensor, v: Tensor, g: Tensor, bias: Tensor, norm: Tensor, maps: Tensor, skip_scale: float, recompute: int,
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, blocks = dy.dtype, v.shape[0]
    v = v.contiguous()
    w, _ = _effective_weights(v, g, dtype)
    geometry = _geometry(dy, v)
    operands = _operands_of(maps, _Blocks(w, bias.contiguous(), geometry, skip_scale), recompute, dtype)
    dv, dg, dbias = (t.new_empty(t.shape if parameters else 0) for t in (v, g, bias))

    def through(b: int, i: int, dz: Tensor, x: Tensor, *, relu: Tensor | None, residual: Tensor | None) -> Tensor:
        """Takes ``dz`` back through convolution ``i`` of block ``b``, whose operand was ``x``."""
        dx = torch.empty_like(dz if residual is None else residual)
        conv.input_gradient(dz, dz, w[b, i], None, None, dx, geometry, operand=relu, residual=residual)
        if parameters:
            found = conv.weight_gradient(dz, dz, x, v[b, i], g[b, i], norm[b, i], True, geometry)
            for whole, part in zip((dv, dg, dbias), found, strict=True):
                assert part is not None
                whole[b, i] = part
        return dx

    dh = dy.permute(0, 2, 3, 1).to(torch.float32).contiguous()
    for b in reversed(range(blocks)):
        operand, a = operands(b)
        dF = dh if skip_scale == 1 else skip_scale * dh
        da = through(b, 1, dF.to(dtype), a, relu=a, residual=None)
        dh = through(b, 0, da, operand, relu=None, residual=dF)
    dx = torch.empty_like(dy, memory_format=suggest_memory_format(dy))
    dx.copy_(dh.permute(0, 3, 1, 2))
    return dx, dv, dg, dbias


def _operands_of(
    maps: Tensor, stage: _Blocks, recompute: int, dtype: torch.dtype
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """``operands(b)``: the two operand maps of a block, kept or, segment by segment, computed again."""
    if recompute == 0:
        return lambda b: (maps[b, 0], maps[b, 1])
    found: dict[int, Tensor] = {}

    def operands(b: int) -> tuple[Tensor, Tensor]:
        if b not in found:
            found.clear()
            h = maps[b // recompute, 0]
            for later in range(b - b % recompute, b + 1):
                pair = torch.empty([2, *h.shape], dtype=dtype, device=h.device)
                stage.operands(later, h, pair[0], pair[1])
                found[later] = pair
                if later < b:
                    h = stage.close(later, h, pair[1])
        return found[b][0], found[b][1]

    return operands
