"""The table of samples: for each op, named argument sets small enough for float64 and gradcheck.

A bug found by hand becomes a row here. ``make(dtype)`` returns ``(function, tensors)``; the function takes the
tensors and returns one output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wnfused import functional


@dataclass(frozen=True)
class Sample:
    """One call of a public op, and the composite of torch's own ops that must agree with it."""

    name: str
    op: Callable[..., Tensor]
    composite: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        if self.channels_last:
            found = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in found]
        return [t.to(dtype).requires_grad_() for t in found]

    def run(self, *tensors: Tensor) -> Tensor:
        return self.op(*tensors, **self.keywords)

    def expected(self, *tensors: Tensor) -> Tensor:
        return self.composite(*tensors, **self.keywords)


def composite_weight(v: Tensor, g: Tensor, dim: int | None = 0) -> Tensor:
    spans = [d for d in range(v.dim()) if dim is None or d != dim % v.dim()]
    shape = [1 if d in spans else n for d, n in enumerate(v.shape)]
    if not spans:  # torch takes no dims for all dims
        return g.reshape(shape) * v.sign()
    return v * (g.reshape(shape) / torch.linalg.vector_norm(v, dim=spans, keepdim=True))


def _each_weight(weight: Callable[..., list[Tensor]], tensors: tuple[Tensor, ...]) -> Tensor:
    """Directions and gains of several layers, as one output that counts each weight differently."""
    vs, gs = list(tensors[::2]), list(tensors[1::2])
    return torch.cat([(i + 1) * w.flatten() for i, w in enumerate(weight(vs, gs))])


def weight_norm_many(*tensors: Tensor, dim: int | None = 0) -> Tensor:
    return _each_weight(lambda vs, gs: functional.weight_norm_many(vs, gs, dim), tensors)


def composite_weight_many(*tensors: Tensor, dim: int | None = 0) -> Tensor:
    return _each_weight(lambda vs, gs: [composite_weight(v, g, dim) for v, g in zip(vs, gs, strict=True)], tensors)


def _activated(y: Tensor, activation: str | None, negative_slope: float) -> Tensor:
    if activation == "relu":
        return F.relu(y)
    return F.leaky_relu(y, negative_slope) if activation == "leaky_relu" else y


def composite_linear(
    x: Tensor, v: Tensor, g: Tensor, b: Tensor | None = None, r: Tensor | None = None, *,
    activation: str | None = None, negative_slope: float = 0.01, dim: int | None = 0,
) -> Tensor:  # fmt: skip
    y = F.linear(x, composite_weight(v, g, dim), b)
    return _activated(y if r is None else y + r, activation, negative_slope)


def linear(x: Tensor, v: Tensor, g: Tensor, b: Tensor | None = None, r: Tensor | None = None, **kw: Any) -> Tensor:
    return functional.linear(x, v, g, b, residual=r, **kw)


def composite_conv(
    x: Tensor, v: Tensor, g: Tensor, b: Tensor | None = None, r: Tensor | None = None, *,
    activation: str | None = None, negative_slope: float = 0.01, dim: int | None = 0, **geometry: Any,
) -> Tensor:  # fmt: skip
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[v.dim()]
    y = conv(x, composite_weight(v, g, dim), b, **geometry)
    return _activated(y if r is None else y + r, activation, negative_slope)


def conv(x: Tensor, v: Tensor, g: Tensor, b: Tensor | None = None, r: Tensor | None = None, **kw: Any) -> Tensor:
    op = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[v.dim()]
    return op(x, v, g, b, residual=r, **kw)


def composite_stage(
    x: Tensor, v: Tensor, g: Tensor, b: Tensor, skip_scale: float = 1.0, recompute: int | None = None
) -> Tensor:
    for block in range(v.shape[0]):
        a = F.relu(F.conv2d(x, composite_weight(v[block, 0], g[block, 0]), b[block, 0], padding=1))
        x = skip_scale * (x + F.conv2d(a, composite_weight(v[block, 1], g[block, 1]), b[block, 1], padding=1))
    return x


def composite_transpose(
    x: Tensor, v: Tensor, g: Tensor, b: Tensor | None = None, r: Tensor | None = None, *,
    activation: str | None = None, negative_slope: float = 0.01, dim: int | None = 0, **geometry: Any,
) -> Tensor:  # fmt: skip
    conv = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[v.dim()]
    y = conv(x, composite_weight(v, g, dim), b, **geometry)
    return _activated(y if r is None else y + r, activation, negative_slope)


def transpose(x: Tensor, v: Tensor, g: Tensor, b: Tensor | None = None, r: Tensor | None = None, **kw: Any) -> Tensor:
    op = {3: functional.conv_transpose1d, 4: functional.conv_transpose2d, 5: functional.conv_transpose3d}[v.dim()]
    return op(x, v, g, b, residual=r, **kw)


def _stage(name: str, blocks: int, n: int, c: int, h: int, w: int, **kw: Any) -> Sample:
    shapes = ((n, c, h, w), (blocks, 2, c, c, 3, 3), (blocks, 2, c), (blocks, 2, c))
    last = kw.pop("channels_last", False)
    return Sample(f"stage-{name}", functional.residual_stage, composite_stage, shapes, kw, last)


SAMPLES = [
    Sample("norm-rows", functional.weight_norm, composite_weight, ((5, 4, 3, 3), (5, 1, 1, 1))),
    Sample("norm-flat-gain", functional.weight_norm, composite_weight, ((5, 7), (5,))),
    Sample("norm-vector", functional.weight_norm, composite_weight, ((6,), (6,))),
    Sample("norm-dim-2", functional.weight_norm, composite_weight, ((3, 4, 5), (1, 1, 5)), {"dim": 2}),
    Sample("norm-dim-1", functional.weight_norm, composite_weight, ((3, 4, 5), (4,)), {"dim": -2}),
    Sample("norm-whole", functional.weight_norm, composite_weight, ((3, 4, 5), ()), {"dim": None}),
    Sample("norm-last", functional.weight_norm, composite_weight, ((5, 4, 3, 3), (5, 1, 1, 1)), channels_last=True),
    Sample("linear", linear, composite_linear, ((3, 4), (5, 4), (5, 1), (5,))),
    Sample("linear-vector", linear, composite_linear, ((4,), (5, 4), (5,), (5,))),
    Sample("linear-3d", linear, composite_linear, ((2, 3, 4), (5, 4), (5, 1))),
    Sample("linear-relu", linear, composite_linear, ((6, 4), (5, 4), (5, 1), (5,)), {"activation": "relu"}),
    Sample("linear-residual", linear, composite_linear, ((6, 4), (5, 4), (5, 1), (5,), (6, 5))),
    Sample(
        "linear-residual-leaky", linear, composite_linear, ((6, 4), (5, 4), (5, 1), (5,), (6, 5)),
        {"activation": "leaky_relu", "negative_slope": 0.2},
    ),
    Sample("linear-dim-1", linear, composite_linear, ((3, 4), (5, 4), (1, 4), (5,)), {"dim": 1}),
    Sample("linear-whole", linear, composite_linear, ((3, 4), (5, 4), (), (5,)), {"dim": None}),
    Sample("conv1d", conv, composite_conv, ((2, 3, 7), (4, 3, 3), (4, 1, 1), (4,)), {"padding": 2, "dilation": 2}),
    Sample("conv1d-dim-2", conv, composite_conv, ((2, 3, 7), (4, 3, 3), (1, 1, 3), (4,)), {"dim": 2, "padding": 1}),
    Sample("conv2d", conv, composite_conv, ((2, 3, 5, 6), (4, 3, 3, 3), (4, 1, 1, 1), (4,)), {"padding": 1}),
    Sample("conv2d-last", conv, composite_conv, ((2, 3, 5, 6), (4, 3, 3, 3), (4, 1, 1, 1), (4,)), {"padding": 1},
           channels_last=True),
    Sample("conv2d-stride", conv, composite_conv, ((2, 3, 5, 6), (4, 3, 3, 3), (4,)), {"stride": (2, 1)}),
    Sample("conv2d-1x1", conv, composite_conv, ((2, 3, 5, 6), (4, 3, 1, 1), (4,), (4,)), {"stride": 2}),
    Sample("conv2d-groups", conv, composite_conv, ((2, 4, 5, 5), (6, 2, 3, 3), (6,), (6,)), {"groups": 2}),
    Sample("conv2d-depthwise", conv, composite_conv, ((2, 4, 5, 5), (4, 1, 3, 3), (4,), (4,)), {"groups": 4}),
    Sample("conv2d-same", conv, composite_conv, ((1, 2, 5, 5), (3, 2, 2, 4), (3,), (3,)), {"padding": "same"}),
    Sample("conv2d-unbatched", conv, composite_conv, ((3, 5, 6), (4, 3, 3, 3), (4,), (4,)), {"padding": 1}),
    Sample(
        "conv2d-relu-residual", conv, composite_conv,
        ((2, 3, 5, 5), (4, 3, 3, 3), (4, 1, 1, 1), (4,), (2, 4, 5, 5)), {"padding": 1, "activation": "relu"},
    ),
    Sample(
        "conv2d-leaky", conv, composite_conv, ((2, 3, 5, 5), (4, 3, 3, 3), (4, 1, 1, 1)),
        {"activation": "leaky_relu", "negative_slope": 0.3},
    ),
    Sample("conv3d", conv, composite_conv, ((1, 2, 3, 4, 3), (3, 2, 2, 2, 2), (3, 1, 1, 1, 1), (3,))),
    Sample("transpose1d", transpose, composite_transpose, ((2, 4, 5), (4, 3, 4), (4, 1, 1), (3,)),
           {"stride": 2, "padding": 1}),
    Sample("transpose2d", transpose, composite_transpose, ((2, 4, 3, 3), (4, 3, 3, 3), (4,), (3,), (2, 3, 6, 6)),
           {"stride": 2, "padding": 1, "output_padding": 1, "activation": "leaky_relu", "negative_slope": 0.1}),
    Sample("transpose2d-groups", transpose, composite_transpose, ((1, 4, 3, 3), (4, 2, 2, 2), (1, 2, 1, 1), (4,)),
           {"groups": 2, "dim": 1, "dilation": 2}),
    Sample("transpose3d", transpose, composite_transpose, ((1, 2, 2, 3, 2), (2, 3, 2, 2, 2), (2,), (3,))),
    _stage("one", 1, 2, 3, 4, 4),
    _stage("three", 3, 2, 2, 3, 3),
    _stage("scaled", 2, 1, 2, 4, 3, skip_scale=0.7),
    _stage("recompute-1", 3, 1, 2, 3, 3, recompute=1),
    _stage("recompute-2", 3, 2, 2, 3, 3, recompute=2),
    _stage("recompute-all", 2, 1, 2, 3, 3, recompute=5),
    _stage("last", 2, 2, 3, 4, 5, channels_last=True),
    _stage("thin", 2, 1, 2, 1, 2),
    Sample("many", weight_norm_many, composite_weight_many, ((5, 4, 3, 3), (5, 1, 1, 1), (3, 7), (3,), (6,), (6,))),
    Sample("many-dim-1", weight_norm_many, composite_weight_many, ((2, 3, 4), (1, 3, 1), (5, 2), (2,)), {"dim": 1}),
    Sample("many-last-dim", weight_norm_many, composite_weight_many, ((2, 3, 4), (1, 1, 4), (5, 2), (2,)), {"dim": -1}),
    Sample("many-whole", weight_norm_many, composite_weight_many, ((2, 3, 4), (), (5,), (1,)), {"dim": None}),
]  # fmt: skip

BY_NAME = {sample.name: sample for sample in SAMPLES}

_RELU = {"activation": "relu"}
_LEAKY = {"activation": "leaky_relu", "negative_slope": 0.2}
# Shapes for which the vendor's libraries have epilogues of their own, and whole tiles of ours beside ragged ones.
ALIGNED = [
    Sample("linear", linear, composite_linear, ((600, 64), (48, 64), (48,), (48,)), _RELU),
    Sample("linear-no-bias", linear, composite_linear, ((600, 64), (48, 64), (48,)), _RELU),
    Sample("linear-residual", linear, composite_linear,
           ((130, 64), (80, 64), (80,), (80,), (130, 80)), _LEAKY),
    Sample("linear-plain", linear, composite_linear, ((600, 33), (65, 33), (65,), (65,))),
    *(
        Sample(f"conv-{name}{'-last' * last}", conv, composite_conv, shapes,
               {"padding": 1, **keywords}, channels_last=last)
        for last in (False, True)
        for name, shapes, keywords in (
            ("relu", ((3, 64, 9, 8), (72, 64, 3, 3), (72,), (72,)), _RELU),
            ("no-bias", ((3, 64, 9, 8), (64, 64, 3, 3), (64,)), _RELU),
            ("residual", ((3, 64, 9, 8), (64, 64, 3, 3), (64,), (64,), (3, 64, 9, 8)), _RELU),
            ("stride", ((3, 64, 9, 8), (64, 64, 3, 3), (64,), (64,)), {"stride": 2, **_LEAKY}),
            ("1x1", ((3, 64, 9, 8), (80, 64, 1, 1), (80,), (80,)), {"padding": 0}),
        )
    ),
]  # fmt: skip
