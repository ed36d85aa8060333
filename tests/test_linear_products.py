"""The linear layer's own products (`csrc/cpu/linear/linear_layer.h`): blocks, chunks and workers, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from test_layer_native import NAMES, TOLERANCE, assert_close, both, linear_sample

import wnfused
from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# (M, K, N) about the limits: of a chunk of the depth (256 floats, 512 bfloat16) in all three products, of the 64 rows
# and the 256 lanes of an item, of a tile, of a block; more rows than features and fewer; an x that workers pack
# together.
SHAPES = [
    (9, 256, 64), (9, 257, 65), (16, 255, 63), (17, 512, 16), (31, 513, 15), (33, 511, 129), (24, 40, 257),
    (255, 33, 70), (257, 17, 40), (513, 24, 9), (300, 7, 1), (70, 2, 300), (260, 520, 30), (129, 270, 260),
    (1030, 20, 18), (1200, 500, 20),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("of_x", "of_parameters"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["float32", "bfloat16", "bfloat16-x"],
)
def test_shapes_about_the_limits(isa, shape, of_x, of_parameters):
    tensors = linear_sample(*shape, dtype=of_x)
    tensors[1:4] = [t.to(of_parameters) for t in tensors[1:4]]
    assert_close(*both(tensors, (), "leaky_relu", 0.2), of_x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data):
    m, k, n = (data.draw(st.integers(low, 330), name) for low, name in ((9, "M"), (16, "K"), (1, "N")))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype")
    needs = data.draw(st.tuples(*[st.booleans()] * 4), "needs")
    activation = data.draw(st.sampled_from(["none", "relu", "leaky_relu"]), "activation")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    tensors = linear_sample(m, k, n, dtype=dtype)
    if dtype == torch.bfloat16 and data.draw(st.booleans(), "bfloat16 parameters"):
        tensors[1:4] = [t.to(dtype) for t in tensors[1:4]]
    torch.ops.wnfused_native.set_cpu_isa(data.draw(st.sampled_from(ISAS), "isa"))
    try:
        dy = torch.randn(m, n).to(dtype)
        found, expected = both(tensors, (), activation, needs=needs, dy=dy)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    # y, of few outputs of which ReLU keeps few, may be far smaller than the terms it sums, whose error it has.
    wide = [t.double() for t in tensors]
    terms = [reference.linear(*wide[:3], None, None, 0, "none")[0], wide[3].expand(m, n), wide[4]]
    error = (found.pop("y").double() - expected.pop("y")).norm()
    assert error <= TOLERANCE[dtype] * sum(term.norm() for term in terms)
    if needs[2]:
        # The sum over rows of a single feature, say, may cancel.
        error = (found.pop("db").double() - expected.pop("db")).norm()
        assert error <= TOLERANCE[dtype] * dy.double().abs().sum(0).norm()
    if needs[1]:
        # <dw, v> / ||v||, of a single row say, may be far smaller than dw, whose error it has.
        _, v, g, *_ = wide
        across, along = expected["dv"] * v.norm(dim=1, keepdim=True) / g.reshape(-1, 1), expected.pop("dg")
        error = (found.pop("dg").double() - along).norm()
        assert error <= TOLERANCE[dtype] * (across.norm() + along.norm())
    assert_close(found, expected, dtype)


# float32 by AVX-512 for any rows of x, by AVX2 for up to 64; bfloat16 by dot products and tiles.
@pytest.mark.parametrize("shape", [(9, 300, 200), (300, 300, 64), (64, 64, 1000), (1200, 500, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_for_any_number_of_threads(threads, isa, shape, dtype):
    floats = dtype == torch.float32
    own = {"avx512": floats, "avx512_bf16": True, "amx": True, "amx-emulated": not floats}
    own["avx2"] = floats and shape[0] <= 64
    if not own.get(isa, False):
        pytest.skip("the vendor's products")
    tensors = linear_sample(*shape, dtype=dtype)
    dy = torch.randn(shape[0], shape[2])
    found = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.append(both(tensors, dy=dy)[0])
    for other in found[1:]:
        for name in NAMES:
            assert torch.equal(found[0][name], other[name]), name


@pytest.mark.parametrize("extreme", ["x", "gain"])
def test_the_same_bits_for_any_number_of_threads_beside_what_is_extreme(threads, isa, extreme):
    """A row of products that is taken again, its weights scaled first, takes all others with it, not its neighbours."""
    if isa not in ("avx512_bf16", "amx", "amx-emulated"):
        pytest.skip("the vendor's products")
    x, v, g, *rest = linear_sample(300, 300, 160, dtype=torch.bfloat16)
    if extreme == "x":
        x[5, 7] = torch.inf
    else:
        g[3] *= 1e5
    found = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found.append(both((x, v, g, *rest))[0]["y"].float().nan_to_num(nan=7.0, posinf=8.0, neginf=9.0))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("rows", [3, 8, 20, 40])
@pytest.mark.parametrize("inner", [64, 330])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("x_size", "v_size", "gain"),
    [
        (1.0, 5e-20, 1.0), (1e-10, 1e-18, 1e8), (1e20, 1e15, 1e-12),
        (1e25, 1e15, 1e3), (1e-25, 1e-15, 1e4), (1.0, 1e17, 1e-20), (1.0, 1e-17, 1e20),
    ],
)  # fmt: skip
def test_bfloat16_has_the_range_of_an_un_normalised_layer(isa, rows, inner, parameters, x_size, v_size, gain):
    """Squares of v that are denormals, or too small for that; the processor's products of pairs lose them."""
    x, v, *_ = linear_sample(rows, inner, 90)
    x, v, g = (x * x_size).bfloat16(), (v * v_size).to(parameters), torch.full((90,), gain).to(parameters)
    y, norm = native.linear(x, v, g, None, None, 0, "none")
    lengths = v.double().norm(dim=1)
    expected = x.double() @ (v.double() * (g.double() / lengths)[:, None]).T
    torch.testing.assert_close(norm.double(), lengths, rtol=1e-5, atol=0)
    assert (y.double() - expected).norm() <= TOLERANCE[torch.bfloat16] * expected.norm()


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_padding_does_not_meet_an_infinite_gain(isa, parameters):
    x, v = torch.ones(20, 35, dtype=torch.bfloat16), torch.ones(7, 35).to(parameters)
    g = torch.ones(7).to(parameters)
    g[0] = float("inf")
    y, _ = native.linear(x, v, g, None, None, 0, "none")
    assert y[:, 0].isposinf().all()
    assert y[:, 1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_neighbours_of_what_is_not_finite_stay_finite(isa, dtype):
    """Padding is zeros, which an infinity beside it must not meet."""
    tensors = linear_sample(37, 35, 21, dtype=dtype)
    tensors[0][36, 34] = float("inf")
    dy = torch.randn(37, 21)
    dy[0, 20] = -float("inf")
    found, expected = both(tensors, (), "none", dy=dy)
    for name, of_row in (("y", 36), ("dx", 0)):
        assert torch.equal(found[name].isfinite(), expected[name].isfinite()), name
        assert found[name].isfinite().all(dim=1).sum() == 36, name
        assert not found[name][of_row].isfinite().any(), name


def test_denormals_are_kept_in_float32(isa):
    x, v, g, bias, residual = linear_sample(40, 50, 30)
    x *= 1e-39
    found, expected = both([x, v, g, 0 * bias, 0 * residual], (), "none")
    assert (found["y"].double() - expected["y"]).abs().max() <= 50 * 2.0**-149
    assert found["y"].any()


def test_more_threads_than_rows(threads, isa):
    torch.set_num_threads(8)
    for shape in ((9, 1200, 33), (1200, 33, 9), (33, 9, 1200)):
        found, expected = both(linear_sample(*shape))
        for name in NAMES:
            error = (found[name].double() - expected[name]).norm() / expected[name].norm()
            assert error <= TOLERANCE[torch.float32], (name, shape)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def test_long_sums_are_as_exact_as_torchs(isa):
    """Over 32,768 products, and of gradients of one sign over as many rows: in one chain of sums, 10 times as wrong."""
    x, v, g = torch.randn(32, 2**15), torch.randn(32, 2**15), torch.ones(32)
    w = v.double() / v.double().norm(dim=1, keepdim=True)
    expected = x.double() @ w.T
    y = wnfused.functional.linear(x, v, g)
    assert relative(y, expected) < 3 * relative(x @ w.float().T, expected)
    rows, bias = torch.rand(2**17, 16), torch.zeros(16, requires_grad=True)
    weights = torch.full((2**17, 16), 1.1)
    y = wnfused.functional.linear(rows, torch.eye(16), torch.ones(16), bias)
    (found,) = torch.autograd.grad(y, bias, weights)
    assert relative(found, weights.double().sum(0)) < 4e-6


def test_long_sums_of_1x1_layers_are_as_exact_as_torchs(isa):
    x, dy = torch.rand(4, 16, 128, 256), torch.ones(4, 32, 128, 256)
    v = torch.randn(32, 16, 1, 1, requires_grad=True)
    exact = v.detach().double().requires_grad_()
    w = exact / exact.flatten(1).norm(dim=1)[:, None, None, None]
    (expected,) = torch.autograd.grad(torch.nn.functional.conv2d(x.double(), w), exact, dy.double())
    (found,) = torch.autograd.grad(wnfused.functional.conv2d(x, v, torch.ones(32)), v, dy)
    assert relative(found, expected) < 4e-6
