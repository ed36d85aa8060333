"""The C++ residual stage in bfloat16, against float64 arithmetic that rounds what the kernels round and nothing else.

Operands of the convolutions are bfloat16: effective weights, activations and their gradients; products are exact, sums
and the stream are fp32. A kernel then differs from the same computation in float64 by fp32's rounding alone, 2^-22 or
so, but for operands that lie so near the middle of two bfloat16 numbers that this difference tips them over: a share of
``2^-22 / 2^-9``, each off by ``2^-8``, which add up in quadrature to ``2^-14``. What is rounded after that tips over
more often, so every step starts from the kernel's own operands where it can be seen, and the backward has one block.
The tolerances are a sixteenth to an eighth of the error that rounding operands makes: a wrong product, tap, row or
border shows.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

kernels = torch.ops.wnfused_native
ISAS = kernels.cpu_isas().split(",") if native.unavailable() is None else []
TOLERANCE = 2**-12
# dx is rounded after an operand was: its difference of 2^-14 tips over a share of 2^-14 / 2^-9.
ROUNDED_TWICE = 2**-11

# (N, C, H, W): chunks of lines that are whole tiles or not, several chunks an image, positions of small maps with full
# and incomplete groups of images, channels that fill a block and that do not.
SHAPES = [
    (2, 16, 32, 32), (3, 32, 16, 16), (9, 64, 8, 8), (1, 16, 9, 13), (3, 24, 5, 7), (1, 1, 1, 1), (2, 3, 1, 5),
    (40, 32, 4, 4), (33, 64, 2, 2), (17, 16, 3, 3), (9, 40, 2, 1), (1, 160, 4, 4), (2, 16, 1, 70), (20, 8, 6, 6),
]  # fmt: skip


@pytest.fixture(params=ISAS)
def isa(request):
    kernels.set_cpu_isa(request.param)
    yield request.param
    kernels.set_cpu_isa("auto")


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
