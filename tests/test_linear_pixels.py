"""Linear layers with many rows for each weight, which run as 1x1 convolutions (`csrc/cpu/ops/linear_pixels.cpp`)."""

from __future__ import annotations

import itertools

import pytest
import torch
from instruction_sets import ISAS, VECTORS
from test_layer_native import NAMES, TOLERANCE, assert_close, both, linear_sample

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# Floats go this way by AVX-512, backward; pairs of bfloat16 by tiles, forward.
FLOATS = [isa for isa in VECTORS if isa not in ("avx2", "portable")]
TILES = [isa for isa in ISAS if isa.startswith("amx")]
of_floats = pytest.mark.parametrize("isa", FLOATS, indirect=True)

# (M, K, N) in whole blocks of 16 channels, ragged, and few: about a panel of 64 rows, a weight gradient as one product
# (128 channels and 256 rows), one that is not; two have too many weights for their rows, or too few rows.
SHAPES = [
    (9, 16, 16), (63, 16, 32), (64, 32, 16), (65, 64, 48), (300, 128, 64), (300, 64, 128), (257, 256, 48),
    (1030, 96, 32), (2048, 16, 16), (64, 128, 128), (8, 16, 16),
    (9, 20, 17), (70, 40, 100), (65, 17, 33), (300, 130, 70), (400, 48, 20), (333, 31, 48),
    (300, 3, 64), (64, 64, 3), (50, 12, 12), (40, 2, 20), (41, 7, 1), (500, 140, 9),
]  # fmt: skip


@of_floats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
def test_shapes(isa, shape, activation):
    assert_close(*both(linear_sample(*shape), (), activation, 0.2), torch.float32)


@pytest.mark.parametrize("isa", TILES, indirect=True)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("of_parameters", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_of_bfloat16(isa, shape, of_parameters):
    tensors = linear_sample(*shape, dtype=torch.bfloat16)
    tensors[1:4] = [t.to(of_parameters) for t in tensors[1:4]]
    for activation in ("none", "relu", "leaky_relu"):
        assert_close(*both(tensors, (), activation, 0.2), torch.bfloat16)


@of_floats
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("shape", [(200, 48, 32), (200, 44, 28)], ids=str)
def test_only_what_is_needed(isa, needs, activation, shape):
    found, expected = both(linear_sample(*shape), (), activation, needs=needs)
    assert_close(found, expected, torch.float32)


@of_floats
@pytest.mark.parametrize("shape", [(700, 64, 48), (300, 128, 64), (700, 60, 44)], ids=str)
def test_the_same_bits_for_any_number_of_threads(isa, shape):
    tensors, dy = linear_sample(*shape), torch.randn(shape[0], shape[2])
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            found.append(both(tensors, dy=dy)[0])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name in NAMES:
            assert torch.equal(found[0][name], other[name]), name


@of_floats
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
def test_what_is_not_finite_comes_out_as_torchs(isa, value, activation):
    tensors = linear_sample(90, 32, 48)
    tensors[0][7, 5] = value
    dy = torch.randn(90, 48)
    dy[11, 3] = value
    found, expected = both(tensors, (), activation, 0.2, dy=dy)
    for name in NAMES:
        wanted = expected[name]
        assert torch.equal(found[name].isnan(), wanted.isnan()), name
        assert torch.equal(found[name].isinf(), wanted.isinf()), name


@of_floats
def test_any_dims_and_strides(isa):
    x, v, g, bias, residual = linear_sample(120, 32, 48)
    wide = torch.randn(120, 64)
    wide[:, ::2] = x
    plain = native.linear(x, v, g, bias, residual, 0, "relu")[0]
    for given, added in (
        (wide[:, ::2], residual),
        (x.reshape(4, 5, 6, 32), residual.reshape(4, 5, 6, 48)),
        (x.t().contiguous().t(), residual.t().contiguous().t()),
    ):
        y = native.linear(given, v, g, bias, added, 0, "relu")[0]
        assert torch.equal(y.reshape(120, 48), plain)


@of_floats
def test_zero_rows_and_gains(isa):
    tensors = linear_sample(200, 32, 48)
    tensors[1][3] = 0
    tensors[2].view(-1)[5] = 0
    found, expected = both(tensors)
    assert_close(found, expected, torch.float32)
    assert not found["dv"][3].any()


@of_floats
def test_range_of_an_un_normalised_layer(isa):
    """Squares of v that are nearly denormals, or large."""
    x, v, _, _, _ = linear_sample(200, 32, 48)
    for size in (1e-18, 1e15):
        y, norm = native.linear(x, v * size, torch.ones(48), None, None, 0, "none")
        lengths = (v.double() * size).norm(dim=1)
        torch.testing.assert_close(norm.double(), lengths, rtol=1e-5, atol=0)
        wanted = x.double() @ (v.double() * size / lengths[:, None]).T
        assert (y.double() - wanted).norm() <= TOLERANCE[torch.float32] * wanted.norm()
