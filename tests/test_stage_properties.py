"""Properties of the C++ residual stage over shapes, layouts and types that Hypothesis draws, against float64.

Tolerances are relative to what was summed, not to the sum, which may cancel: a rounding error of the stream is eps of
the largest stream. ``dv`` and ``dg`` are components of the weight gradient ``dW``, a sum over pixels of products
``x d`` of an operand and a gradient. An error common to all ``d``, such as that of a weight it came through, is eps of
``dW``; errors of their own for every ``d``, such as its rounding, add up in quadrature to eps of the walk
``sqrt(sum x^2 d^2)``, however the sum itself cancels (22 pixels of one channel do to 1/300, and the products of
operands rounded in float64 alike then reproduce the kernel to 1e-7 of the walk). A sum of
9 C products errs like a random walk and blocks add up in quadrature, hence ``16 eps sqrt(blocks)`` as in
``test_stage_native``. bfloat16 rounds operands to ``u = 2^-9``: each convolution errs by ``u`` for each of its two
operands, each block has two, and so ``4 u sqrt(blocks)``; in the backward an operand carries the forward's error too.
The float64 backward starts from the kernel's own maps: an activation within rounding of zero then has one mask.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from torch import Tensor

from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

kernels = torch.ops.wnfused_native

reproducible = settings(derandomize=True, deadline=None, max_examples=150)


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call of the stage. Its values follow from the seed, so that a falsifying example prints in one line."""

    blocks: int
    shape: tuple[int, int, int, int]
    skip_scale: float
    recompute: int
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    memory_format: torch.memory_format
    isa: str
    seed: int

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        channels = self.shape[1]
        v = torch.randn(self.blocks, 2, channels, channels, 3, 3, generator=generator)
        g = torch.rand(self.blocks, 2, channels, generator=generator) + 0.5
        g[:, 1] *= max(self.blocks, 1) ** -0.5
        bias = 0.1 * torch.randn(self.blocks, 2, channels, generator=generator)
        return self.map(generator), *(t.to(self.parameter_dtype) for t in (v, g, bias))

    def output_gradient(self) -> Tensor:
        return self.map(torch.Generator().manual_seed(self.seed + 1))

    def map(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator).to(self.dtype).contiguous(memory_format=self.memory_format)


@st.composite
def draws(draw) -> Draw:
    channels = draw(st.sampled_from([1, 3, 15, 16, 17, 24, 32, 40, 48]))
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    # Batches of 16 and more take other paths on small maps; on large ones they only take time.
    most = 33 if channels * channels * height * width <= 2**13 else 3
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Draw(
        blocks=draw(st.integers(0, 4)),
        shape=(draw(st.integers(0, most)), channels, height, width),
        skip_scale=draw(st.floats(0.25, 1.0, width=32)),
        recompute=draw(st.integers(0, 5)),
        dtype=dtype,
        parameter_dtype=draw(st.sampled_from([torch.float32, dtype])),
        memory_format=draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
        isa=draw(st.sampled_from(ISAS or ["portable"])),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.fixture(autouse=True, scope="module")
def _automatic_afterwards():
    threads = torch.get_num_threads()
    yield
    kernels.set_cpu_isa("auto")
    torch.set_num_threads(threads)


def run(case: Draw, recompute: int) -> tuple[Tensor, ...]:
    """(y, dx, dv, dg, dbias, norm, maps)."""
    kernels.set_cpu_isa(case.isa)
    x, *parameters = case.arguments()
    y, norm, maps = kernels.residual_stage(x, *parameters, case.skip_scale, recompute, True)
    gradients = kernels.residual_stage_backward(
        case.output_gradient(), *parameters, norm, maps, case.skip_scale, recompute, True
    )
    return y, *gradients, norm, maps


def size(*tensors: Tensor) -> float:
    """The largest norm; 0 of nothing."""
    return max(t.double().norm().item() for t in tensors)


def weight_gradient_walk(case: Draw, norm: Tensor, maps: Tensor) -> Tensor:
    """``sqrt(sum x^2 d^2)`` of every weight, in float64."""
    v, g = (t.double() for t in case.arguments()[1:3])
    w = v * (g / norm)[..., None, None, None]
    dh = case.output_gradient().double()
    walks = torch.zeros_like(v)
    for b in reversed(range(case.blocks)):
        h, a = maps[b].double().movedim(-1, 2)
        d = case.skip_scale * dh
        da = F.conv_transpose2d(d, w[b, 1], padding=1) * (a > 0)
        for walk, x, gradient in ((walks[b, 1], a, d), (walks[b, 0], h, da)):
            walk.copy_(torch.nn.grad.conv2d_weight(x.square(), walk.shape, gradient.square(), padding=1).sqrt())
        dh = d + F.conv_transpose2d(da, w[b, 0], padding=1)
    return walks


@reproducible
@given(draws())
def test_forward_and_backward_match_float64(case):
    arguments = case.arguments()
    x, v, g, bias = (t.double() for t in arguments)
    dy = case.output_gradient()
    y, dx, dv, dg, dbias, norm, maps = run(case, 0)
    wanted_y, wanted_norm, streams = reference.residual_stage(x, v, g, bias, case.skip_scale, 0, True)
    wanted = reference.residual_stage_backward(
        dy.double(), v, g, bias, wanted_norm, maps.double(), case.skip_scale, 0, True
    )

    unit = 16 * torch.finfo(torch.float32).eps if case.dtype == torch.float32 else 4 * 2**-9
    tolerance = unit * max(case.blocks, 1) ** 0.5
    assert y.dtype == dx.dtype == case.dtype
    assert y.is_contiguous(memory_format=reference.suggest_memory_format(arguments[0]))
    assert size(y - wanted_y) <= tolerance * size(wanted_y, x, *streams.flatten(0, 1))
    assert size(norm - wanted_norm) <= 16 * torch.finfo(torch.float32).eps * size(wanted_norm)

    wanted_dx, wanted_dv, wanted_dg, wanted_dbias = wanted
    assert size(dx - wanted_dx) <= tolerance * size(wanted_dx, dy)
    assert size(dbias - wanted_dbias) <= tolerance * size(wanted_dbias, dy)
    # dv and dg are the parts of dW across and along v, dv in units of g / ||v||.
    across = (wanted_norm / g)[..., None, None, None]
    weight_gradient = size(wanted_dg, across * wanted_dv, weight_gradient_walk(case, wanted_norm, maps))
    assert size(dg - wanted_dg) <= tolerance * weight_gradient
    assert size(across * (dv - wanted_dv)) <= tolerance * weight_gradient


@reproducible
@given(draws(), st.integers(1, 4), st.integers(1, 4))
def test_threads_and_recomputation_change_no_bit(case, threads, more_threads):
    torch.set_num_threads(threads)
    first = run(case, 0)[:6]
    torch.set_num_threads(more_threads)
    for recompute in {0, case.recompute}:
        for a, b in zip(first, run(case, recompute), strict=False):
            assert torch.equal(a, b)
