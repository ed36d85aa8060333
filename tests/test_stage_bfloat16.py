"""The C++ residual stage in bfloat16, against float64 arithmetic that rounds what the kernels round and nothing else.

Operands of the convolutions are bfloat16: effective weights, activations and their gradients; products are exact, sums
and the stream are fp32. A kernel then differs from the same computation in float64 by fp32's rounding alone, 2^-22 or
so, but for operands that lie so near the middle of two bfloat16 numbers that this difference tips them over: a share of
``2^-22 / 2^-9``, each off by ``2^-8``, which add up in quadrature to ``2^-14``. What is rounded after that tips over
more often, so every step starts from the kernel's own operands where it can be seen, and the backward has one block.
The tolerances are a sixteenth to an eighth of the error that rounding operands makes: a wrong product, tap, row or
border shows.

A thousand blocks are compared so, and with float64 arithmetic that rounds nothing. Rounding to 8 bits is off by
``u = 2^-9`` of an operand, as the root of the mean square over mantissas. An increment of the stream takes four
(``h, w_1, a, w_2``; backward ``dh, w_2, da, w_1``), so it is off by ``2 u``. Those of different blocks are independent,
add up in quadrature as the increments do themselves, and are carried on by the blocks after as the stream is: whatever
the depth, the stream is off by ``2 u`` of itself at most, and its rounded end by ``sqrt(5) u``. On given masks,
``dW_1 = (h, da)`` has three roundings of its own and the stream's error, ``sqrt(7) u``, ``dW_2`` and ``dbias`` less:
all within ``GIVEN_MASKS = 4 u``.

Masks that are computed are wrong where an activation lies within its error of zero. It is off by ``sqrt(6) u`` of its
spread (the stream, ``h`` and ``w_1``), so by the Gaussian's angle a share ``p = sqrt(6) u / pi`` changes sign, beside
the half that pass: ``da`` is off by ``sqrt(2 p) = 2^-4.2``, the stream of gradients by as much at most, and ``dW_1`` by
both in quadrature, ``2^-3.7``.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

kernels = torch.ops.wnfused_native
TOLERANCE = 2**-12
# dx is rounded after an operand was: its difference of 2^-14 tips over a share of 2^-14 / 2^-9.
ROUNDED_TWICE = 2**-11
GIVEN_MASKS = 2**-7
COMPUTED_MASKS = 2**-3.5

# (N, C, H, W): chunks of lines that are whole tiles or not, several chunks an image, chunks of one tile of rows and
# many blocks of outputs, positions of small maps with full and incomplete groups of images, channels that fill a block
# and that do not; with dot products, maps of 4x4 tiles go to the kernels for floats and the others (those of 10x6 and
# 6x6 pixels are the largest) do not.
SHAPES = [
    (2, 16, 32, 32), (3, 32, 16, 16), (9, 64, 8, 8), (1, 16, 9, 13), (3, 24, 5, 7), (1, 1, 1, 1), (2, 3, 1, 5),
    (40, 32, 4, 4), (33, 64, 2, 2), (17, 16, 3, 3), (9, 40, 2, 1), (1, 160, 4, 4), (2, 16, 1, 70), (20, 8, 6, 6),
    (3, 32, 10, 6), (9, 64, 6, 6), (1, 160, 2, 2), (1, 96, 3, 3), (9, 64, 1, 16), (32, 48, 1, 16), (2, 80, 8, 8),
    (3, 16, 32, 32),
]  # fmt: skip


def rounded(t: Tensor) -> Tensor:
    return t.float().bfloat16().double()


def sample(n: int, c: int, h: int, w: int, blocks: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    v, g = torch.randn(blocks, 2, c, c, 3, 3), torch.rand(blocks, 2, c) + 0.5
    g[:, 1] *= blocks**-0.5
    bias = torch.randn(blocks, 2, c) * 0.1
    return torch.randn(n, c, h, w).bfloat16(), *(t.to(dtype) for t in (v, g, bias))


def weights(v: Tensor, g: Tensor, norm: Tensor, factor: float = 1.0) -> Tensor:
    """``factor g v / ||v||`` of every row, in fp32 as the kernels compute it and then rounded to bfloat16."""
    scale = torch.tensor(factor) * (g.float() / norm)
    return rounded(v.float() * scale[..., None, None, None])


def forward(x: Tensor, w: Tensor, bias: Tensor, maps: list[Tensor], skip_scale: float) -> tuple[Tensor, list[Tensor]]:
    """The output, not yet rounded, and the operands ``h_b, a_b``, each computed from the kernel's one before."""
    h, operands, b = x.double(), [], bias.double()
    for block in range(len(w)):
        operands.append(rounded(h))
        operands.append(rounded(F.relu(F.conv2d(maps[2 * block], w[block, 0], b[block, 0], padding=1))))
        h = skip_scale * (h + F.conv2d(maps[2 * block + 1], w[block, 1], b[block, 1], padding=1))
    return h, operands


def backward(
    dy: Tensor, first: Tensor, second: Tensor, h: Tensor, a: Tensor, skip_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one block: ``dx, dW, dbias`` and the walk ``sqrt(sum x^2 d^2)`` of ``dW``."""
    d = dy.double()
    da = rounded(F.conv_transpose2d(d, second, padding=1) * (a > 0))
    shape, pairs = first.shape, ((h, da), (a, skip_scale * d))
    weight_gradient = torch.nn.grad.conv2d_weight
    dw = torch.stack([weight_gradient(x, shape, gradient, padding=1) for x, gradient in pairs])
    walk = torch.stack([weight_gradient(x**2, shape, gradient**2, padding=1).sqrt() for x, gradient in pairs])
    dbias = torch.stack([gradient.sum((0, 2, 3)) for _, gradient in pairs])
    return skip_scale * d + F.conv_transpose2d(da, first, padding=1), dw, dbias, walk


def assert_within(name: str, actual: Tensor, expected: Tensor, scale: Tensor | float, tolerance: float) -> None:
    size = torch.maximum(expected.norm(), torch.as_tensor(scale).double().norm())
    assert (actual.double() - expected).norm() <= tolerance * size, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_rounds_operands_alone(shape, dtype, isa):
    x, v, g, bias = sample(*shape, 2, dtype)
    y, norm, maps = kernels.residual_stage(x, v, g, bias, 0.9, 0, True)
    saved = [t.double().movedim(-1, 1) for t in maps.flatten(0, 1)]
    expected, operands = forward(x, weights(v, g, norm), bias, saved, 0.9)
    assert_within("y", y, rounded(expected), expected, TOLERANCE)
    for kept, operand in zip(saved, operands, strict=True):
        assert_within("maps", kept, operand, expected, TOLERANCE)


@pytest.mark.parametrize("value", [None, float("inf"), float("nan"), -float("nan")], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_saves_nothing_computes_the_same_bits(shape, value, isa):
    """Its operands have borders where the tiles read them in place; a NaN whose sign is set looks like less than 0."""
    x, v, g, bias = sample(*shape, 3, torch.float32)
    if value is not None:
        x[-1, -1, -1, -1] = value
    expected, expected_norm, _ = kernels.residual_stage(x, v, g, bias, 0.9, 0, True)
    y, norm, _ = kernels.residual_stage(x, v, g, bias, 0.9, 0, False)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(norm, expected_norm)
    assert y.isfinite().all() == (value is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_rounds_operands_alone(shape, dtype, isa):
    x, v, g, bias = sample(*shape, 1, dtype)
    dy = torch.randn(shape).bfloat16()
    _, norm, maps = kernels.residual_stage(x, v, g, bias, 0.9, 0, True)
    dx, dv, dg, dbias = kernels.residual_stage_backward(dy, v, g, bias, norm, maps, 0.9, 0, True)

    h, a = maps[0].double().movedim(-1, 2)
    first, second = weights(v, g, norm)[0, 0], weights(v, g, norm, 0.9)[0, 1]
    expected, dw, expected_dbias, walk = backward(dy, first, second, h, a, 0.9)
    assert_within("dx", dx, rounded(expected), expected, ROUNDED_TWICE)
    rows, length = v[0].double(), norm[0].double()
    expected_dg = (dw * rows).sum((2, 3, 4)) / length
    across = dw - rows * (expected_dg / length)[..., None, None, None]
    scale = (g[0].double() / length)[..., None, None, None]
    # Gradients of bfloat16 parameters are rounded too.
    tolerance = TOLERANCE + (0.0 if dtype == torch.float32 else 2**-9)
    assert_within("dv", dv[0].double() / scale, across, walk, tolerance)
    assert_within("dg", dg[0], expected_dg, walk, tolerance)
    assert_within("dbias", dbias[0], expected_dbias, dy.double(), tolerance)


DEPTH = 1000
DEEP_SHAPES = [(1, 16, 8, 8), (20, 16, 2, 2)]  # one for each way of multiplying pairs, by lines and by positions


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", DEEP_SHAPES, ids=str)
def test_a_thousand_blocks_round_operands_alone(shape, isa):
    """The stream, summed in fp32, has walked off by ``2^-24 sqrt(1000)`` in the end, tipping over a share of 2^-10."""
    x, v, g, bias = sample(*shape, DEPTH, torch.float32)
    y, norm, maps = kernels.residual_stage(x, v, g, bias, 1.0, 0, True)
    saved = [t.double().movedim(-1, 1) for t in maps.flatten(0, 1)]
    expected, operands = forward(x, weights(v, g, norm), bias, saved, 1.0)
    assert_within("y", y, rounded(expected), expected, TOLERANCE)
    for name, first in (("h", 0), ("a", 1)):
        assert_within(name, torch.stack(saved[first::2]), torch.stack(operands[first::2]), 0.0, TOLERANCE)


@functools.cache
def exact(shape: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensor, Tensor, tuple[Tensor, ...]]:
    """Arguments of a thousand blocks with ``dy``, and in float64 the output, the norms and the gradients."""
    torch.manual_seed(0)
    arguments = *sample(*shape, DEPTH, torch.float32), torch.randn(shape).bfloat16()
    x, *parameters, dy = (t.double() for t in arguments)
    y, norm, maps = reference.residual_stage(x, *parameters)
    return arguments, y, norm, reference.residual_stage_backward(dy, *parameters, norm, maps)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", DEEP_SHAPES, ids=str)
def test_a_thousand_blocks_against_exact_arithmetic(shape, isa):
    (x, v, g, bias, dy), expected, exact_norm, on_computed_masks = exact(shape)
    y, norm, maps = kernels.residual_stage(x, v, g, bias, 1.0, 0, True)
    gradients = kernels.residual_stage_backward(dy, v, g, bias, norm, maps, 1.0, 0, True)

    parameters = [t.double() for t in (v, g, bias)]
    on_given_masks = reference.residual_stage_backward(dy.double(), *parameters, exact_norm, maps.double())
    assert_within("y", y, expected, 0.0, GIVEN_MASKS)
    for wanted, tolerance in ((on_given_masks, GIVEN_MASKS), (on_computed_masks, COMPUTED_MASKS)):
        for name, actual, gradient in zip(("dx", "dv", "dg", "dbias"), gradients, wanted, strict=True):
            assert_within(name, actual, gradient, 0.0, tolerance)

    again, norm, maps = kernels.residual_stage(x, v, g, bias, 1.0, 32, True)
    recomputed = kernels.residual_stage_backward(dy, v, g, bias, norm, maps, 1.0, 32, True)
    for actual, same in zip((again, *recomputed), (y, *gradients), strict=True):
        assert torch.equal(actual, same)
