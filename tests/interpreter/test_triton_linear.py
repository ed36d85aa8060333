"""The linear layer's kernels: ragged tiles, both weight gradients, layouts, zero rows, the edges of the range."""

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DEVICE, DTYPES, NAMES, SMALL, bias, both, check

from wnfused.backends import triton as backend
from wnfused.backends.triton import configurations, linear_layer, strategy
from wnfused.backends.triton.kernels import common

# (M, K, N): one tile and many, ragged ones at each edge, either side of the two weight gradients' border.
SIZES = [(0, 5, 7), (1, 1, 1), (1, 33, 17), (17, 40, 18), (64, 16, 32), (65, 35, 17), (300, 20, 18), (5, 0, 3)]


@pytest.fixture(autouse=True)
def fused():
    with strategy.forced("fused"):
        yield


def sample(m, k, n, dtype=torch.float32, parameters=torch.float32):
    x, v = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).to(parameters)
    g, b = torch.randn(n, 1, device=DEVICE).to(parameters), torch.randn(n, device=DEVICE).to(parameters)
    return [x, v, g, b, torch.randn(m, n, device=DEVICE).to(dtype)]


@pytest.mark.parametrize("tile", [SMALL, None], ids=["small tiles", "the table's"])
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size, activation, tile):
    with configurations.forced(tile):
        check(*both("linear", sample(*size), activation=activation), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("parameters", ["the operands'", "float32"])
@pytest.mark.parametrize("size", [(17, 40, 18), (300, 20, 18)], ids=str)
def test_half_precision_with_either_type_of_parameters(size, dtype, parameters):
    tensors = sample(*size, dtype, torch.float32 if parameters == "float32" else dtype)
    found, expected = both("linear", tensors, activation="relu")
    assert found["y"].dtype == found["dx"].dtype == dtype
    assert found["dv"].dtype == found["dg"].dtype == tensors[1].dtype
    check(found, expected, dtype)


def test_float16_operands_do_not_round_parameters_beyond_their_range():
    tensors = sample(5, 8, 6, torch.float16)
    tensors[1] *= torch.tensor([1e-9, 1e9, 1, 1e-6, 1e6, 1e3], device=DEVICE)[:, None]
    found, expected = both("linear", tensors, activation="relu")
    for name in ("y", "dx", "dg"):
        check({name: found[name]}, {name: expected[name]}, torch.float16)


def test_both_weight_gradients_agree():
    x, v, g, b, _ = sample(40, 24, 18)
    y, norm = linear_layer.forward(x, v, g, b, None, "relu", 0.0)
    dy = torch.randn_like(y)
    with configurations.forced(SMALL):
        split = linear_layer._split(dy, y, x, v, g, norm, True, 1, 0.0)
        recomputed = linear_layer._recomputed(dy, y, x, v, g, norm, True, 1, 0.0)
    for one, other in zip(split, recomputed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("activation", ["none", "leaky_relu"])
def test_only_what_is_needed(needs, activation):
    needs = tuple(bool(needed) for needed in needs)
    found, expected = both("linear", sample(7, 6, 5), activation=activation, needs=needs)
    check(found, expected, torch.float32)
    assert found["dz"].numel() == (35 if needs[3] and activation != "none" else 0)


def test_layouts():
    x, v, g, b, r = sample(12, 20, 10)
    plain, _ = both("linear", [x, v, g, b, r], activation="relu", dy=torch.ones(12, 10, device=DEVICE))
    wide = torch.randn(12, 40, device=DEVICE)
    wide[:, ::2] = x
    strided = torch.zeros(20, device=DEVICE)
    strided[::2] = b
    tensors = [wide[:, ::2], v.T.contiguous().T, g.expand(10, 1), strided[::2], r.T.contiguous().T]
    # An expanded gradient, as `y.sum()` sends back, has strides of 0.
    found, expected = both("linear", tensors, activation="relu", dy=torch.ones((), device=DEVICE).expand(12, 10))
    check(found, expected, torch.float32)
    for name in NAMES:
        torch.testing.assert_close(found[name], plain[name])


@pytest.mark.parametrize("way", ["fused", "vendor"])
@pytest.mark.parametrize("m", [9, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_rows_give_zeros(m, dtype, way):
    tensors = sample(m, 20, 10, dtype, dtype)
    tensors[1][3] = 0
    tensors[3] = tensors[4] = None
    with strategy.forced(way):
        found, expected = both("linear", tensors)
    check(found, expected, dtype)
    assert not any(found[name][3].any() for name in ("dv", "dg", "norm"))
    assert not found["y"][:, 3].any()


@pytest.mark.parametrize("exponent", [-17, -9, 0, 9, 17])
def test_over_float32s_range(exponent):
    x, v, g, b, _ = sample(4, 33, 5)
    v = v / v.norm(dim=1, keepdim=True) * 10.0**exponent
    found, expected = both("linear", [x, v, g, b, None])
    expected["dv"], found["dv"] = expected["dv"] * 10.0**exponent, found["dv"].double() * 10.0**exponent
    expected["norm"], found["norm"] = expected["norm"] / 10.0**exponent, found["norm"].double() / 10.0**exponent
    check(found, expected, torch.float32)


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
def test_infinities_and_nan_come_out_as_the_reference_gives_them(activation):
    x, v, g, b, _ = sample(5, 6, 7)
    x[0, 0], x[1, 1], x[2, 2] = float("inf"), float("-inf"), float("nan")
    found, _ = backend.linear(x, v, g, b, None, 0, activation, 0.1)
    from wnfused import reference

    expected, _ = reference.linear(x, v, g, b, None, 0, activation, 0.1)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_the_same_call_gives_the_same_bits():
    tensors = sample(200, 40, 18)
    dy = torch.randn(200, 18, device=DEVICE)
    one, two = (both("linear", tensors, activation="relu", dy=dy)[0] for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in NAMES)


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("batch", [5, 70])
def test_masks_and_zero_rows_where_something_is_not_finite(batch, slope):
    """NaN in y counts as negative in a leaky ReLU, one of slope 0 is a ReLU, and a zero row has no gradient."""
    x, v, g, b, _ = sample(batch, 6, 9)
    v[4] = 0
    b[2] = float("nan")
    dy = torch.randn(batch, 9, device=DEVICE)
    dy[1, 3], dy[2, 4], dy[3, 5] = float("inf"), float("nan"), float("inf")
    found, expected = both("linear", [x, v, g, b, None], activation="leaky_relu", slope=slope, dy=dy)
    assert (found["dv"][4] == 0).all()
    assert found["dg"][4] == 0
    for name in ("dx", "dv", "dg", "db"):
        assert torch.equal(found[name].isnan(), expected[name].isnan()), name
        torch.testing.assert_close(found[name].double(), expected[name], equal_nan=True, rtol=1e-4, atol=1e-4)


@triton.jit
def _rounded(X, Y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(Y + at, common.round_to_tf32(tl.load(X + at)))


def test_rounding_to_tf32():
    """A tie goes away from zero, a carry into the exponent, and what is not finite stays what it is. (Of a NaN whose
    bits are all beyond the tenth of its mantissa a GPU makes an infinity; no operation gives one.)"""
    x = torch.randn(64) * 10.0 ** torch.arange(-32, 32)
    special = [0x3F801000, 0x3F800FFF, 0x3F803000, 0x3FFFF000, 0, 0x7F800000, 0x7FFFFFFF, 0x7FC00000]
    x[:8] = torch.tensor(special, dtype=torch.int32).view(torch.float32)
    x[8:16] = -x[:8]
    y = torch.empty(64, device=DEVICE)
    _rounded[(1,)](x.to(DEVICE), y, SIZE=64)
    y = y.cpu()
    assert y[:4].view(torch.int32).tolist() == [0x3F802000, 0x3F800000, 0x3F804000, 0x40000000]
    exponent = torch.frexp(x.double()).exponent
    nearest = torch.ldexp(torch.floor(torch.ldexp(x.double().abs(), 11 - exponent) + 0.5), exponent - 11)
    nearest = torch.where(torch.isfinite(x), torch.copysign(nearest, x.double()), x.double())
    torch.testing.assert_close(y.double(), nearest, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.signbit()[~y.isnan()], x.signbit()[~y.isnan()])


@pytest.mark.parametrize("batch", [40, 90])
def test_tf32_has_no_bias(batch):
    """Operands cut off rather than rounded would leave each of these sums of positive numbers 7e-4 too small."""
    torch.backends.cuda.matmul.allow_tf32 = True
    x, v, g, _, _ = (t.abs() for t in sample(batch, 70, 50))
    found, expected = both("linear", [x, v, g, None, None], dy=torch.rand(batch, 50, device=DEVICE))
    for name in ("y", "dx", "dg"):
        error = (found[name].double() - expected[name]) / expected[name]
        assert abs(bias(found[name], expected[name])) < 5e-5, name
        assert 1e-5 < error.abs().max() < 2e-3, name
