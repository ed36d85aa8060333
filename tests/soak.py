"""A soak of the C++ kernels on CPU, for a library built with sanitizers: ``make sanitize``.

Two Python threads call the ops at once, round after round, each round on another instruction set and thread count, on
shapes and values drawn to reach the corners: empty batches, maps smaller than a tile, odd widths, recomputation,
strided inputs, values that are not finite. The instruction sets include the dot products and the tiles of bfloat16,
the tiles emulated; a soak goes on until on each of them every op ran in every dtype, and every kind of stage by every
method that it chooses from, and fails where that takes ten times as long. The sanitizers end the process on their first
report. So that the soak also sees a wrong result, every outcome is compared with the reference in float64, in one
number a tensor and loosely: bounds that hold for every draw, an order of magnitude above those of the tests.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import own_conv
import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends import native

ROUND_SECONDS = 1.0
# How many times as long as asked for a soak may take until every case has run on every instruction set.
PATIENCE = 10
FP32 = 1e-4
# An operand in bfloat16 is off by 2^-9 of itself, and a few of those add up in every block.
BF16 = 2**-3

Op = Callable[..., tuple[Tensor, ...]]
Case = Callable[[random.Random], None]

kernels = torch.ops.wnfused_native

# How a stage multiplies floats, and bfloat16 where the instruction set has products of its own for them.
FLOAT_METHODS = ("direct", "winograd2", "winograd4")
CONV_METHODS = (*FLOAT_METHODS, "pieces")
# Without products of their own, linear layers leave more than a few rows to the vendor; and so do convolutions.
WITHOUT_PRODUCTS = ("portable", "amx-emulated")
PAIR_METHODS = {
    "amx": ("lines", "positions"),
    "amx-emulated": ("lines", "positions"),
    "avx512_bf16": ("lines", "positions", "winograd4"),
}


class WrongResultError(AssertionError):
    """A kernel and the reference disagree."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", required=True, help="the C++ library to load")
    parser.add_argument("--seconds", type=float, default=60.0, help="at least (default: 60)")
    options = parser.parse_args()
    torch.ops.load_library(options.library)
    # Every uninitialised tensor is filled with NaN, so what a kernel leaves unwritten shows.
    torch.use_deterministic_algorithms(True)

    isas = kernels.cpu_isas().split(",")
    calls = {isa: Counter[str]() for isa in isas}
    start = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        for number in itertools.count():
            # The instruction set is the process's: it changes between rounds, never under a running pair of calls.
            isa = isas[number % len(isas)]
            kernels.set_cpu_isa(isa)
            end = time.monotonic() + ROUND_SECONDS
            seeds = 2 * number, 2 * number + 1
            for counted in threads.map(functools.partial(soak, cases(isa), calls[isa].copy(), end), seeds):
                calls[isa] += counted
            left = [f"{case} on {isa}" for isa in isas for case in cases(isa) if case not in calls[isa]]
            elapsed = time.monotonic() - start
            if elapsed >= options.seconds and (not left or elapsed >= PATIENCE * options.seconds):
                break
    for isa, counts in calls.items():
        print(f"soak: {isa}: " + ", ".join(f"{case} {count}" for case, count in sorted(counts.items())))
    if left:
        print(f"soak: too slow: never ran {', '.join(left)}", file=sys.stderr)
        return 1
    print(f"soak: {time.monotonic() - start:.0f} s, every result right")
    return 0


def soak(todo: dict[str, Case], before: Counter[str], end: float, seed: int) -> Counter[str]:
    """Cases of one thread until ``end``, those first that ran least before; how many of each."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    while time.monotonic() < end:
        torch.set_num_threads(draw.randint(1, 4))
        label = min(todo, key=lambda case: (before[case] + counts[case], draw.random()))
        try:
            todo[label](draw)
        except Exception:
            print(f"soak: {label} failed, case {counts.total()} of seed {seed}", file=sys.stderr)
            raise
        counts[label] += 1
    return counts


def cases(isa: str) -> dict[str, Case]:
    """What runs on an instruction set, by name."""
    halves = (torch.float32, torch.bfloat16)
    todo: dict[str, Case] = {"orthonormal_rows": orthonormal_rows}
    for dtype in halves:
        methods = PAIR_METHODS.get(isa, FLOAT_METHODS) if dtype == torch.bfloat16 else FLOAT_METHODS
        for run, method in itertools.product((stage, stage_not_finite), methods):
            todo[named(run, dtype, method)] = functools.partial(run, dtype=dtype, method=method)
    for method in (*CONV_METHODS, *(() if isa in WITHOUT_PRODUCTS else ("unfolded",))):
        todo[named(own_layer, torch.float32, method)] = functools.partial(own_layer, method=method)
    if isa not in WITHOUT_PRODUCTS:
        todo[named(planes_layer, torch.float32)] = planes_layer
        todo[named(strips_layer, torch.float32)] = strips_layer
    for run, dtypes in (
        (weight_norm, (*halves, torch.float64, torch.float16)),
        (weight_norm_many, halves),
        (linear, halves),
        (conv, halves),
        (wide_layer, halves[:1]),
        (wide_stage, halves),
    ):
        for dtype in dtypes:
            todo[named(run, dtype)] = functools.partial(run, dtype=dtype)
    return todo


def named(run: Callable[..., None], dtype: torch.dtype, *more: str) -> str:
    return " ".join((run.__name__, str(dtype).removeprefix("torch."), *more))


def stage(draw: random.Random, dtype: torch.dtype, method: str) -> None:
    a_stage(draw, dtype, stage_shape(draw, dtype, method), draw.randint(0, 4))


def wide_stage(draw: random.Random, dtype: torch.dtype) -> None:
    """More weights than a worker's cache holds: packed group by group."""
    shape = draw.choice((0, 1, 2, 20)), draw.randint(250, 300), draw.randint(4, 9), draw.randint(4, 9)
    a_stage(draw, dtype, shape, 1)


def a_stage(draw: random.Random, dtype: torch.dtype, shape: tuple[int, int, int, int], blocks: int) -> None:
    skip_scale = draw.uniform(0.5, 1)
    x, v, g, bias = stage_arguments(draw, shape, blocks)
    dy = strided(draw, normal(draw, *x.shape)).to(dtype)
    x = strided(draw, x).to(dtype)
    if draw.random() < 0.3:
        v, g, bias = v.to(dtype), g.to(dtype), bias.to(dtype)
    if blocks and draw.random() < 0.2:
        v[draw.randrange(blocks), draw.randrange(2), draw.randrange(v.shape[2])] = 0
    tolerance = FP32 if dtype == torch.float32 else BF16
    wide = [t.double() for t in (x, v, g, bias)]

    y, norm, maps = kernels.residual_stage(x, v, g, bias, skip_scale, 0, True)
    close("y", y, reference.residual_stage(*wide, skip_scale, 0, False)[0], tolerance)
    gradients = kernels.residual_stage_backward(dy, v, g, bias, norm, maps, skip_scale, 0, True)
    # From the kernel's own maps, so that an activation within rounding of zero has the same mask on both sides.
    wanted = reference.residual_stage_backward(
        dy.double(), *wide[1:], norm.double(), maps.double(), skip_scale, 0, True
    )  # fmt: skip
    # What is rounded are the terms of sums, which may cancel: in dbias over pixels, in dv and dg over v's entries too.
    across = dy.double().norm()
    along = across * maps.double().norm() / max(1, x.numel()) ** 0.5
    for name, actual, expected, scale in zip(
        ("dx", "dv", "dg", "dbias"), gradients, wanted, (across, along, along, across), strict=True
    ):
        close(name, actual, expected, tolerance, scale)

    every = draw.randint(1, 5)
    again, norm, maps = kernels.residual_stage(x, v, g, bias, skip_scale, every, True)
    same("y, recompute", again, y)
    recomputed = kernels.residual_stage_backward(dy, v, g, bias, norm, maps, skip_scale, every, True)
    for name, actual, expected in zip(("dx", "dv", "dg", "dbias"), recomputed, gradients, strict=True):
        same(f"{name}, recompute", actual, expected)
    same("y, nothing saved", kernels.residual_stage(x, v, g, bias, skip_scale, 0, False)[0], y)


def stage_not_finite(draw: random.Random, dtype: torch.dtype, method: str) -> None:
    x, v, g, bias = stage_arguments(draw, stage_shape(draw, dtype, method), 1)
    x = x.to(dtype)
    if x.numel():
        x.view(-1)[draw.randrange(x.numel())] = draw.choice((float("inf"), -float("inf"), float("nan")))
    y, norm, maps = kernels.residual_stage(x, v, g, bias, 1.0, 0, True)
    wide = [t.double() for t in (x, v, g, bias)]
    expected = reference.residual_stage(*wide, 1.0, 0, False)[0]
    same("which of y are finite", torch.isfinite(y), torch.isfinite(expected))
    kernels.residual_stage_backward(normal(draw, *x.shape).to(dtype), v, g, bias, norm, maps, 1.0, 0, True)


def weight_norm(draw: random.Random, dtype: torch.dtype) -> None:
    shape = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
    v = strided(draw, normal(draw, *shape)).to(dtype)
    dim = draw.choice((None, *range(v.dim())))
    rows = 1 if dim is None else shape[dim]
    g = gain(draw, rows).to(dtype)
    if dim is not None and draw.random() < 0.2:
        v.select(dim, draw.randrange(rows)).zero_()
    shaped = g.reshape([] if dim is None else [-1 if d == dim else 1 for d in range(v.dim())])
    dw = strided(draw, normal(draw, *shape)).to(dtype)
    tolerance = FP32 if dtype in (torch.float32, torch.float64) else BF16

    w, norm = native.weight_norm(v, shaped, dim)
    expected, expected_norm = reference.weight_norm(v.double(), shaped.double(), dim)
    close("w", w, expected, tolerance)
    close("norm", norm, expected_norm, tolerance)
    gradients = native.weight_norm_backward(dw, v, shaped, norm, dim)
    wanted = reference.weight_norm_backward(dw.double(), v.double(), shaped.double(), expected_norm, dim)
    # What lies along v cancels, down to nothing in a row of one number: errors are those of dw's size.
    for name, actual, gradient in zip(("dv", "dg"), gradients, wanted, strict=True):
        close(name, actual, gradient, tolerance, scale=dw.double().norm() * (g.double().max() / expected_norm.max()))


def weight_norm_many(draw: random.Random, dtype: torch.dtype) -> None:
    """The same kernels as for one tensor: every result is that of a call of its own."""
    vs = [normal(draw, *(draw.randint(1, 40) for _ in range(draw.randint(1, 4)))).to(dtype) for _ in range(5)]
    gs = [gain(draw, v.shape[0]).reshape(-1, *[1] * (v.dim() - 1)) for v in vs]
    dws = [normal(draw, *v.shape).to(dtype) for v in vs]
    weights, norms, scales = native.weight_norm_many(vs, gs, 0)
    gradients = native.weight_norm_many_backward(dws, vs, gs, norms, 0)
    for v, g, dw, w, norm, scale, dv, dg in zip(vs, gs, dws, weights, norms, scales, *gradients, strict=True):
        for actual, expected in zip((w, norm), native.weight_norm(v, g, 0), strict=True):
            same("one of many", actual, expected)
        close("scale", scale, g.double().flatten() / norm.double(), FP32)
        for actual, expected in zip((dv, dg), native.weight_norm_backward(dw, v, g, norm, 0), strict=True):
            same("gradient of one of many", actual, expected)


def orthonormal_rows(draw: random.Random) -> None:
    rows = draw.randint(1, 70)
    a = normal(draw, draw.randint(0, 3), rows, 2 * rows + draw.randint(0, 40))
    q = a.clone()
    if not native.orthonormal_rows_(q).all():
        raise WrongResultError("orthonormal_rows: gave up a Gaussian matrix twice as long as wide")
    q = q.double()
    close("Q Q'", q @ q.mT, torch.eye(rows, dtype=torch.float64).expand(len(a), rows, rows), FP32)
    lower = a.double() @ q.mT
    close("L", lower, lower.tril(), FP32)
    if not (lower.diagonal(dim1=1, dim2=2) > 0).all():
        raise WrongResultError("orthonormal_rows: L's diagonal is not positive")


def linear(draw: random.Random, dtype: torch.dtype) -> None:
    rows, inputs, outputs = draw.choice((0, 1, 2, draw.randint(3, 70))), draw.randint(1, 80), draw.randint(1, 80)
    if draw.random() < 0.3:  # enough rows for a 1x1 convolution
        rows, inputs, outputs = draw.randint(30, 300), draw.randint(1, 140), draw.randint(1, 50)
    if draw.random() < 0.2:  # wide enough for floats in pieces
        rows, inputs, outputs = draw.randint(16, 70), draw.randint(256, 330), draw.randint(256, 300)
    x = strided(draw, normal(draw, rows, inputs)).to(dtype)
    v = normal(draw, outputs, inputs)
    layer(draw, native.linear, native.linear_backward, reference.linear, reference.linear_backward, x, v, ())


def conv(draw: random.Random, dtype: torch.dtype) -> None:
    groups, kernel = draw.choice((1, 1, 1, 2, 3)), draw.choice(((1, 1), (3, 3), (3, 1), (2, 5), (3, 3, 3), (2, 1, 4)))
    dims = len(kernel)
    inputs, outputs = groups * draw.randint(1, 24), groups * draw.randint(1, 24)
    size = [draw.randint(5, 12 if dims == 2 else 8) for _ in range(dims)]
    x = strided(draw, normal(draw, draw.choice((0, 1, 2, 5)), inputs, *size)).to(dtype)
    v = strided(draw, normal(draw, outputs, inputs // groups, *kernel))
    stride, padding = ([draw.randint(1, 2) for _ in range(dims)] for _ in range(2))
    geometry = (stride, padding, [1] * dims, False, [0] * dims, groups)
    layer(draw, native.conv, native.conv_backward, reference.conv, reference.conv_backward, x, v, geometry)


def own_layer(draw: random.Random, method: str) -> None:
    """A layer that ``method`` takes from the vendor's library; directly, also a transposed or a depthwise one."""
    while True:
        case = conv3x3(draw) if method.startswith("winograd") else window(draw)
        if min(case.output_size) > 0 and method == own_conv.way_of(case):
            break
    x = strided(draw, normal(draw, case.images, case.inputs, *case.size))
    v = normal(draw, *own_conv.weight_shape(case))
    v = own_conv.channels_last(v, draw.random() < 0.5) if case.transposed else strided(draw, v)
    ops = (native.conv, native.conv_backward, reference.conv, reference.conv_backward)
    # With norms along another dim such a layer is the vendor's, whose kernels read beyond maps smaller than a window.
    layer(draw, *ops, x, v, case.geometry, rows_only=method == "unfolded")


def planes_layer(draw: random.Random) -> None:
    """A 1x1 layer in NCHW, at times with a stride, that is products of v and each image as it lies."""
    dims, strided_by = draw.randint(1, 3), draw.choice((1, 1, 2, 3))
    images, inputs, outputs = draw.randint(1, 6), draw.randint(32, 90), draw.randint(32, 90)
    size = (*(draw.randint(3, 8) for _ in range(dims - 1)), draw.randint(15, 300))
    ones = (1,) * dims
    case = own_conv.Case(images, inputs, outputs, size, ones, (*ones[1:], strided_by), (0,) * dims, ones)
    x = strided(draw, normal(draw, images, inputs, *size))
    v = normal(draw, *own_conv.weight_shape(case))
    ops = (native.conv, native.conv_backward, reference.conv, reference.conv_backward)
    layer(draw, *ops, x, v, case.geometry, rows_only=True)


def strips_layer(draw: random.Random) -> None:
    """A layer with few channels on a side, or in a group; at times transposed, or in channels_last."""
    dims, transposed = draw.randint(1, 2), draw.random() < 0.3
    groups = 1 if transposed else draw.choice((1, 1, 2, 5))
    few, many = draw.randint(1, 6), draw.randint(1, 12 if groups > 1 else 40)
    inputs, outputs = draw.choice(((few, many), (many, few)))
    kernel, stride, dilation = (tuple(draw.randint(1, most) for _ in range(dims)) for most in (5, 3, 3))
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(draw.randint(0, (r - 1) // 2 if transposed else r) for r in reach)
    size = tuple(draw.randint(max(1, r - 2 * p), 40) for r, p in zip(reach, padding, strict=True))
    counts = draw.randint(1, 4), groups * inputs, groups * outputs
    case = own_conv.Case(*counts, size, kernel, stride, padding, dilation, transposed, groups=groups)
    x = strided(draw, normal(draw, case.images, case.inputs, *size))
    v = own_conv.channels_last(normal(draw, *own_conv.weight_shape(case)), draw.random() < 0.3)
    ops = (native.conv, native.conv_backward, reference.conv, reference.conv_backward)
    layer(draw, *ops, x, v, case.geometry, rows_only=True)


def wide_layer(draw: random.Random, dtype: torch.dtype) -> None:
    """More weights than a worker's cache holds: packed group by group, or kept from call to call."""
    images, inputs, outputs = draw.choice((1, 1, 2, 8)), draw.randint(250, 300), draw.randint(250, 300)
    size = draw.randint(3, 11), draw.randint(3, 11)
    case = own_conv.same3x3(images, inputs, outputs, *size)
    if draw.random() < 0.5:
        transposed = draw.random() < 0.5
        case = own_conv.Case(images, inputs, outputs, size, (3, 3), (2, 2), (1, 1), (1, 1), transposed)
    x = strided(draw, normal(draw, images, inputs, *size)).to(dtype)
    v = own_conv.channels_last(normal(draw, *own_conv.weight_shape(case)), draw.random() < 0.5)
    ops = (native.conv, native.conv_backward, reference.conv, reference.conv_backward)
    layer(draw, *ops, x, v, case.geometry, rows_only=True)

    op = kernels.kept_conv_transpose if case.transposed else kernels.kept_conv
    stride, padding, dilation, _, extra, groups = case.geometry
    constants = (stride, padding, dilation, *([extra] if case.transposed else []), groups, 0, 0.1)
    g, banks = gain(draw, v.shape[0], *[1] * 3), []
    expected = reference.conv(x.double(), v.double(), g.double(), None, None, *case.geometry, 0, "none", 0.1)[0]
    for _ in range(2):
        y, bank = op(x, v, g, None, None, banks, *constants)
        banks += [] if bank is None else [bank]
        if y is not None:  # None: left to the caller
            close("y", y, expected, FP32, scale=x.double().norm() + y.numel() ** 0.5)


def conv3x3(draw: random.Random) -> own_conv.Case:
    images, inputs, outputs = draw.choice((1, 1, 2, 5, 20)), draw.randint(9, 50), draw.randint(9, 50)
    levels, groups = draw.choice(((), (), (draw.randint(1, 5),))), 1
    if not levels and draw.random() < 0.3:
        groups = draw.choice((2, 3, 4, 5, 8))
        inputs, outputs = (groups * draw.choice((16, 32, 48)) for _ in range(2))
        if draw.random() < 0.5:  # that have blocks in common
            inputs = outputs = groups * draw.choice((4, 8, 12, 20, 24, 28, 40, 56))
    size = (*levels, draw.randint(1, 14), draw.randint(1, 14))
    return own_conv.same3x3(images, inputs, outputs, *size)._replace(groups=groups)


def window(draw: random.Random) -> own_conv.Case:
    dims = draw.choice((1, 2, 3))

    def each(*values: int) -> tuple[int, ...]:
        return tuple(draw.choice(values) for _ in range(dims))

    size = tuple(draw.randint(1, {1: 60, 2: 14, 3: 7}[dims]) for _ in range(dims))
    images, outputs = draw.choice((1, 1, 2, 5, 20)), draw.randint(6, 50)
    inputs = draw.choice((draw.randint(1, 7), draw.randint(6, 50)))
    kernel, stride, padding, dilation = each(1, 1, 2, 3, 5, 9), each(1, 1, 2, 3), each(0, 1, 2, 4), each(1, 1, 2)
    case = own_conv.Case(images, inputs, outputs, size, kernel, stride, padding, dilation, draw.random() < 0.4)
    if draw.random() < 0.3:
        return case._replace(outputs=inputs, groups=inputs, transposed=False)
    if draw.random() < 0.2:
        groups, each_outputs = draw.choice((4, 8)), draw.choice((4, 16, 32))
        inputs, outputs = draw.choice((4, 8, 16)) * groups, each_outputs * groups
        return case._replace(inputs=inputs, outputs=outputs, groups=groups, transposed=False)
    return case


def layer(
    draw: random.Random, forward: Op, backward: Op, wanted_forward: Op, wanted_backward: Op, x: Tensor, v: Tensor,
    geometry: tuple[object, ...], rows_only: bool = False,
) -> None:  # fmt: skip
    transposed = len(geometry) > 3 and geometry[3] is True
    outputs = v.shape[1] if transposed else v.shape[0]
    dim = 0 if transposed or rows_only else draw.choice((0, 0, 0, None, v.dim() - 1))
    rows = [1] * v.dim() if dim is None else [n if d == dim else 1 for d, n in enumerate(v.shape)]
    g = gain(draw, *rows)
    bias = draw.choice((None, normal(draw, outputs)))
    options = (dim, draw.choice(("none", "relu", "leaky_relu")), 0.1)
    tolerance = FP32 if x.dtype == torch.float32 else BF16
    wide = [None if t is None else t.double() for t in (x, v, g, bias)]
    expected, expected_norm = wanted_forward(*wide, None, *geometry, *options)
    residual = draw.choice((None, normal(draw, *expected.shape).to(x.dtype)))
    if residual is not None:
        expected = wanted_forward(*wide, residual.double(), *geometry, *options)[0]

    y, norm = forward(x, v, g, bias, residual, *geometry, *options)
    # What is rounded is the product and what is added to it, which may cancel or be cut off by the activation.
    close("y", y, expected, tolerance, scale=x.double().norm() + y.numel() ** 0.5)
    close("norm", norm, expected_norm, FP32)
    dy = strided(draw, normal(draw, *y.shape)).to(x.dtype)
    present = (True, True, bias is not None, residual is not None)
    needs = [given and draw.random() < 0.7 for given in present]
    gradients = backward(dy, y, x, v, g, norm, needs, *geometry, *options)
    wanted = wanted_backward(
        dy.double(), y.double(), *wide[:3], expected_norm, needs, *geometry, *options
    )  # fmt: skip
    for name, actual, gradient in zip(("dx", "dv", "dg", "dbias", "dz"), gradients, wanted, strict=True):
        if actual.numel() or gradient.numel():
            close(name, actual, gradient, tolerance, scale=dy.double().norm() * (1 + x.double().norm()))


def stage_shape(draw: random.Random, dtype: torch.dtype, method: str) -> tuple[int, int, int, int]:
    """A shape that ``method`` suits, of at most about 2^20 products: batches 0 to 40, widths that fill a vector and
    that do not, maps from 1x1 up, lines of a vector and longer."""
    while True:
        channels = draw.choice((1, 3, 15, 16, 17, 24, 32, 40, 64, 160))
        height, width = (draw.choice((draw.randint(1, 11), draw.randint(1, 11), 32, 40)) for _ in range(2))
        shape = draw.choice((0, 1, 1, 2, 3, draw.randint(4, 40))), channels, height, width
        if max(1, shape[0]) * channels * channels * height * width > 2**20:
            continue
        if kernels.cpu_stage_method(*shape, dtype == torch.bfloat16) == method:
            return shape


def stage_arguments(draw: random.Random, shape: tuple[int, int, int, int], blocks: int) -> tuple[Tensor, ...]:
    c = shape[1]
    v, g, bias = normal(draw, blocks, 2, c, c, 3, 3), gain(draw, blocks, 2, c), 0.1 * normal(draw, blocks, 2, c)
    return normal(draw, *shape), v, g, bias


def normal(draw: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.getrandbits(60)))


def gain(draw: random.Random, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(draw.getrandbits(60))) + 0.5


def strided(draw: random.Random, t: Tensor) -> Tensor:
    """The same values: contiguous, channels_last, or every other element of a larger tensor."""
    layout = draw.choice(("contiguous", "channels_last", "sparse"))
    if layout == "channels_last" and t.dim() in (4, 5):
        return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
    if layout == "sparse":
        return torch.empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t)
    return t


def close(name: str, actual: Tensor, expected: Tensor, tolerance: float, scale: Tensor | float = 0.0) -> None:
    if actual.shape != expected.shape:
        raise WrongResultError(f"{name}: shape {list(actual.shape)}, the reference has {list(expected.shape)}")
    distance = (actual.double() - expected).norm()
    if not distance <= tolerance * torch.maximum(expected.norm(), torch.as_tensor(scale).double()):
        raise WrongResultError(f"{name}: off by {distance:.3g}, the reference's norm is {expected.norm():.3g}")


def same(name: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual, expected):
        raise WrongResultError(f"{name}: bits differ")


if __name__ == "__main__":
    sys.exit(main())
