"""The C++ single layers on CPU: every instruction set against the reference in float64.

An output is a sum of K products in fp32, a gradient of v one of M: rounding errors grow like a random walk, a few times
eps of the sum's typical size, hence the norm-wise ``64 eps``. bfloat16 operands and results are off by 2^-9 each; the
reference runs on the rounded operands, and a mask is read off the same rounded output.
"""

import functools
import itertools
import math

import pytest
import torch

import wnfused
from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

kernels = torch.ops.wnfused_native
TOLERANCE = {torch.float32: 64 * 2.0**-24, torch.bfloat16: 4 * 2.0**-9}
NAMES = ("y", "norm", "dx", "dv", "dg", "db", "dz")

# (M, K, N): either side of the small kernels' limits, runs with and without a last partial vector, several slices.
LINEAR = [
    (0, 5, 7), (1, 2, 1), (1, 33, 17), (2, 64, 50), (3, 16, 5), (4, 100, 9), (5, 40, 21), (6, 7, 40), (7, 129, 18),
    (8, 48, 33), (16, 70, 13), (17, 70, 13), (19, 200, 35), (32, 128, 31), (33, 70, 13), (40, 9, 11), (90, 65, 130),
    (40, 700, 3000),
]  # fmt: skip
# (N, C_in, size, C_out, kernel, stride, padding, dilation, groups)
CONV = [
    (2, 5, 7, 9, 3, 1, 1, 1, 1), (2, 16, 6, 32, 1, 1, 0, 1, 1), (1, 40, 3, 36, 3, 1, 1, 1, 1),
    (3, 4, 9, 6, 3, 2, 1, 1, 2), (2, 6, 8, 6, 3, 1, 2, 2, 6), (0, 3, 5, 4, 3, 1, 1, 1, 1), (2, 1, 5, 1, 3, 1, 1, 1, 1),
    (2, 8, 6, 16, 1, 1, 0, 1, 1), (2, 8, 6, 64, 1, 1, 0, 1, 1),
]  # fmt: skip


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def linear_sample(m, k, n, dtype=torch.float32):
    x, v = torch.randn(m, k).to(dtype), torch.randn(n, k) * 0.3
    return [x, v, torch.randn(n, 1), torch.randn(n), torch.randn(m, n).to(dtype)]


def conv_sample(n, c_in, size, c_out, kernel, stride, padding, dilation, groups, dtype=torch.float32):
    x, v = torch.randn(n, c_in, size, size, dtype=dtype), torch.randn(c_out, c_in // groups, kernel, kernel) * 0.3
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    geometry = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    return [
        x,
        v,
        torch.randn(c_out, 1, 1, 1),
        torch.randn(c_out),
        torch.randn(n, c_out, out, out, dtype=dtype),
    ], geometry


def both(tensors, geometry=(), activation="relu", slope=0.01, needs=(True,) * 4, dy=None):
    """``(found, expected)``, each by the names in NAMES; the reference's backward reads the found output's signs."""
    op = "conv" if geometry else "linear"
    tail = (*geometry, 0, activation, slope)
    y, norm = getattr(native, op)(*tensors, *tail)
    dy = torch.randn(y.shape).to(y.dtype) if dy is None else dy
    dy = torch.empty_like(y).copy_(dy)
    x, v, g, *_ = tensors
    gradients = getattr(native, f"{op}_backward")(dy, y, x, v, g, norm, list(needs), *tail)
    wide = [None if t is None else t.double() for t in tensors]
    y64, norm64 = getattr(reference, op)(*wide, *tail)
    gradients64 = getattr(reference, f"{op}_backward")(
        dy.double(), y.double(), *wide[:3], norm64, list(needs), *tail
    )  # fmt: skip
    found, expected = (y, norm, *gradients), (y64, norm64, *gradients64)
    return dict(zip(NAMES, found, strict=True)), dict(zip(NAMES, expected, strict=True))


def assert_close(found, expected, dtype=torch.float32):
    for name in found:
        actual, wanted = found[name].double(), expected[name]
        assert actual.shape == wanted.shape, name
        assert torch.equal(actual.isfinite(), wanted.isfinite()), name
        actual, wanted = actual.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0)
        error = (actual - wanted).norm() / wanted.norm().clamp_min(1e-30) if wanted.numel() else 0.0
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize(
    ("activation", "slope"), [("none", 0.0), ("relu", 0.0), ("leaky_relu", 0.2), ("leaky_relu", 0.0)]
)
def test_linear(isa, shape, activation, slope):
    assert_close(*both(linear_sample(*shape), (), activation, slope))


@pytest.mark.parametrize("shape", CONV, ids=str)
@pytest.mark.parametrize("last", [(False, False), (True, False), (True, True)], ids=["nchw", "last", "last-weight"])
@pytest.mark.parametrize(("activation", "slope"), [("none", 0.0), ("relu", 0.0), ("leaky_relu", 0.2)])
def test_conv(isa, shape, last, activation, slope):
    tensors, geometry = conv_sample(*shape)
    for which in itertools.compress((0, 1), last):
        tensors[which] = tensors[which].contiguous(memory_format=torch.channels_last)
    found, expected = both(tensors, geometry, activation, slope)
    assert_close(found, expected)
    plain = torch.nn.functional.conv2d(tensors[0], tensors[1], None, geometry[0], geometry[1], geometry[2], geometry[5])
    assert found["y"].stride() == plain.stride()
    assert found["dv"].stride() == tensors[1].stride()


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_bfloat16(isa, parameters):
    dtype = torch.bfloat16
    samples = [(linear_sample(m, k, n, dtype), ()) for m, k, n in ((3, 33, 17), (40, 65, 34))]
    samples += [conv_sample(*CONV[0], dtype=dtype), conv_sample(*CONV[2], dtype=dtype)]
    for tensors, geometry in samples:
        tensors[1:4] = [t.to(parameters) for t in tensors[1:4]]
        found, expected = both(tensors, geometry)
        assert found["y"].dtype == found["dx"].dtype == found["dz"].dtype == dtype
        assert found["dv"].dtype == found["dg"].dtype == found["db"].dtype == parameters
        assert found["norm"].dtype == torch.float32
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_zero_rows_and_gains(isa, rows):
    """A gain of 0 has a gradient, which s dw no longer knows; gains far from 1 must not lose it either."""
    tensors = linear_sample(rows, 37, 21)
    tensors[1][3] = 0
    for gains in ([0.0], [1e-12], [1e12], [0.0, 1e-30, 3e8]):
        tensors[2] = torch.randn(21, 1)
        tensors[2][5 : 5 + len(gains), 0] = torch.tensor(gains)
        found, expected = both(tensors)
        # Row by row: dv is as large as the row's scale, while dg, which may cancel, does not depend on it.
        for row in range(21):
            for name, size in (("dv", expected["dv"][row].norm()), ("dg", expected["dg"].abs().mean())):
                error = (found[name][row].double() - expected[name][row]).norm()
                assert error <= 4 * TOLERANCE[torch.float32] * size, (name, row)
        assert not found["dv"][3].any()
        assert not found["dg"][3].any()


def test_zero_rows_and_gains_of_a_convolution(isa):
    for channels_last in (False, True):
        tensors, geometry = conv_sample(*CONV[2])
        tensors[1][3] = 0
        tensors[2][4] = 0
        if channels_last:
            tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
        found, expected = both(tensors, geometry)
        assert_close(found, expected)
        assert not found["dv"][3].any()
        assert found["dg"][4].abs() > 0


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 3, 4], ids=["x", "v", "bias", "residual"])
def test_what_is_not_finite_stays_so(isa, rows, value, where):
    tensors = linear_sample(rows, 37, 21)
    tensors[where].view(-1)[5] = value
    y, _ = native.linear(*tensors, 0, "leaky_relu", 0.1)
    expected, _ = reference.linear(*(t.double() for t in tensors), 0, "leaky_relu", 0.1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())


def test_infinite_gradients_do_not_pass_the_relu(isa):
    for rows in (3, 40):
        tensors = linear_sample(rows, 37, 21)
        tensors[3] = torch.full((21,), -1e6)
        found, _ = both(tensors, (), "relu", dy=torch.full((rows, 21), float("inf")))
        assert not any(found[name].any() for name in ("dx", "dv", "dg", "db", "dz"))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs):
    for tensors, geometry in ((linear_sample(5, 9, 6), ()), (linear_sample(40, 9, 6), ()), conv_sample(*CONV[0])):
        for activation in ("none", "relu"):
            assert_close(*both(tensors, geometry, activation, needs=needs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "inputs"), [(0, 9), (5, 0), (0, 0)])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed_of_nothing(needs, rows, inputs, dtype, isa):
    """Empty tensors have no memory, which must not be taken for gradients that nobody asked for, or the other way."""
    assert_close(*both(linear_sample(rows, inputs, 6, dtype), needs=needs), dtype)


def test_inputs_in_any_strides(threads):
    for rows in (4, 40):
        tensors = linear_sample(rows, 37, 21)
        tensors[0] = torch.randn(37, rows).T
        tensors[1] = torch.randn(37, 42)[:, ::2].T
        tensors[2] = torch.randn(21, 2)[:, :1]
        tensors[3] = torch.randn(42)[::2]
        tensors[4] = torch.randn(21, rows).T
        assert_close(*both(tensors))
    tensors, geometry = conv_sample(*CONV[0])
    tensors[0] = torch.randn(2, 7, 7, 5).permute(0, 3, 2, 1)
    tensors[1] = torch.randn(3, 3, 5, 9).permute(3, 2, 1, 0)
    tensors[4] = torch.randn(2, 7, 7, 9).permute(0, 3, 1, 2)
    assert_close(*both(tensors, geometry))


@pytest.mark.parametrize(("rows", "inner", "features"), [(3, 0, 4), (3, 4, 0), (40, 0, 4), (40, 4, 0)])
def test_empty_weights(rows, inner, features):
    x, v, g, bias, residual = linear_sample(rows, inner, features)
    y, norm = native.linear(x, v, g, bias, residual, 0, "relu")
    assert torch.equal(y, torch.relu(bias + residual))
    gradients = native.linear_backward(torch.ones_like(y), y, x, v, g, norm, [True] * 4, 0, "relu")
    for gradient, like in zip(gradients, (x, v, g, bias, residual), strict=True):
        assert gradient.shape == like.shape
    assert not gradients[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(("inputs", "features"), [(4, 0), (0, 4), (0, 0)])
def test_layers_of_no_features_have_a_backward(inputs, features, dim, dtype):
    layer = wnfused.WNLinear(inputs, features, activation="relu", dim=dim, dtype=dtype)
    x = torch.ones(2, 3, inputs, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        layer.bias.fill_(1)
    layer(x).sum().backward()
    assert not x.grad.any()
    assert not layer.weight_v.grad.any()
    assert torch.equal(layer.bias.grad, torch.full([features], 6.0, dtype=dtype))


def test_leading_dims_of_a_linear_layer():
    x, v, g, bias, _ = linear_sample(24, 9, 6)
    y, _ = native.linear(x.reshape(2, 3, 4, 9), v, g, bias, None, 0, "relu")
    assert torch.equal(y.flatten(0, 2), native.linear(x, v, g, bias, None, 0, "relu")[0])
    assert native.linear(x[0], v, g, bias, None, 0, "relu")[0].shape == (6,)


def test_bitwise_equal_from_run_to_run(isa, threads):
    for tensors, geometry in (
        (linear_sample(7, 300, 500), ()),
        (linear_sample(90, 300, 200), ()),
        conv_sample(*CONV[2]),
    ):
        dy = torch.randn(tensors[4].shape)
        first, second = (both(tensors, geometry, dy=dy)[0] for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_other_spatial_dims(isa):
    for spatial in (1, 3):
        x, v = torch.randn(2, 4, *[5] * spatial), torch.randn(6, 4, *[3] * spatial)
        geometry = ([1] * spatial, [1] * spatial, [1] * spatial, False, [0] * spatial, 1)
        tensors = [x, v, torch.randn(6), torch.randn(6), torch.randn(2, 6, *[5] * spatial)]
        assert_close(*both(tensors, geometry))
        if spatial == 3:
            tensors[0] = x.contiguous(memory_format=torch.channels_last_3d)
            assert_close(*both(tensors, geometry))


def test_shapes_that_do_not_fit_raise():
    x, v, g, *_ = linear_sample(3, 4, 5)
    for arguments in ((x, v, g[:3]), (x[:, :3], v, g), (x.double(), v, g)):
        with pytest.raises(RuntimeError):
            kernels.linear(*arguments, None, None, 0, 0.0)


def test_gradients_that_do_not_fit_raise():
    x, v, g, *_ = linear_sample(20, 30, 5)
    y, norm = kernels.linear(x, v, g, None, None, 1, 0.0)
    dy = torch.ones_like(y)
    for name, arguments in (
        ("dy", (dy[:19], y, x, v, g, norm)),
        ("dy", (dy.bfloat16(), y, x, v, g, norm)),
        ("y", (dy, y[:, :4], x, v, g, norm)),
        ("norm", (dy, y, x, v, g, norm[:4])),
        ("norm", (dy, y, x, v, g, norm.double())),
        ("dy", (dy.reshape(4, 5, 5), y, x.reshape(5, 4, 30), v, g, norm)),
    ):
        with pytest.raises(RuntimeError, match=f": {name} must"):
            kernels.linear_backward(*arguments, 15, 1, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["own", "vendor"])
@pytest.mark.parametrize("needs", [15, 4])
def test_gradients_of_a_convolution_that_do_not_fit_raise(dtype, needs):
    x, v, g = torch.randn(2, 16, 6, 6, dtype=dtype), torch.randn(32, 16, 3, 3), torch.randn(32)
    window = ([2, 2], [1, 1], [1, 1], 1)
    y, norm = kernels.conv(x, v, g, None, None, *window, 1, 0.0)
    dy = torch.ones_like(y)
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    wide = torch.ones(2, 64, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last)
    for name, arguments in (
        ("dy", (wide, y, x, v, g, norm)),
        ("dy", (dy[0], y, x, v, g, norm)),
        ("dy", (dy[..., :2], y, x, v, g, norm)),
        ("y", (dy, y[:1], x, v, g, norm)),
        ("y", (dy, y.to(other), x, v, g, norm)),
        ("norm", (dy, y, x, v, g, norm[:1].expand(32))),
        ("norm", (dy, y, x, v, g, norm.bfloat16())),
        ("groups", (dy, y, x, v, g, norm)),
    ):
        with pytest.raises(RuntimeError, match=f": {name} must"):
            kernels.conv_backward(*arguments, needs, *window[:3], 0 if name == "groups" else 1, 1, 0.0)


# ------------------------------------------------------------------------------------------------------- range


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize(
    ("x_size", "v_size", "gain"),
    [
        (1e25, 1e15, 1.0), (1e25, 1e15, 1e3), (1e-25, 1e-15, 1.0), (1e-30, 1e-17, 1e4), (1e30, 1e6, 1.0),
        (1e34, 1e3, 1e2), (1.0, 1e17, 1e-20), (1.0, 1e-17, 1e20), (1e20, 1e-10, 1e15),
    ],
)  # fmt: skip
def test_outputs_have_the_range_of_an_un_normalised_layer(isa, rows, x_size, v_size, gain):
    """The product with v itself would overflow, or sink into denormals, where that with w does not."""
    x, v, _, bias, _ = linear_sample(rows, 37, 21)
    x, v, g = x * x_size, v * v_size, torch.full((21,), gain)
    expected, _ = reference.linear(x.double(), v.double(), g.double(), bias.double(), None, 0, "leaky_relu", 0.1)
    assert expected.abs().max() < torch.finfo(torch.float32).max
    found, norm = native.linear(x, v, g, bias, None, 0, "leaky_relu", 0.1)
    assert found.isfinite().all()
    assert (found.double() - expected).norm() <= TOLERANCE[torch.float32] * expected.norm()
    torch.testing.assert_close(norm.double(), v.double().norm(dim=1), rtol=1e-6, atol=0)

    tensors, geometry = conv_sample(*CONV[2])
    x, v, g = tensors[0] * x_size, tensors[1] * v_size, torch.full((36,), gain)
    arguments = (x, v, g, tensors[3], None)
    wide = [None if t is None else t.double() for t in arguments]
    expected, _ = reference.conv(*wide, *geometry, 0, "relu", 0.0)
    found, _ = native.conv(*arguments, *geometry, 0, "relu", 0.0)
    assert (found.double() - expected).norm() <= TOLERANCE[torch.float32] * expected.norm()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (wnfused.WNLinear, (4, 3)),
        (functools.partial(wnfused.WNConv2d, kernel_size=3), (1, 3, 4, 4)),
        (functools.partial(wnfused.WNConv2d, kernel_size=3, dim=1), (1, 3, 4, 4)),
        (functools.partial(wnfused.WNConvTranspose2d, kernel_size=3), (1, 3, 4, 4)),
    ],
    ids=["linear", "conv", "another dim", "transposed"],
)
def test_a_slope_of_0_is_a_relu_where_y_is_nan(make, shape, backend):
    layer, x = make(3, 5, activation="leaky_relu", negative_slope=0.0), torch.randn(shape)
    x.view(-1)[0] = math.nan
    with wnfused.use_backend(backend):
        residual = torch.zeros_like(layer(x), requires_grad=True)
        y = layer(x, residual=residual)
        (dz,) = torch.autograd.grad(y, residual, torch.ones_like(y))
    assert y.isnan().any()
    assert torch.equal(dz, torch.where(y <= 0, 0.0, 1.0))


@pytest.mark.parametrize("groups", [1, 16])
def test_a_slope_of_0_stops_an_infinite_gradient(groups):
    x, v, g = torch.randn(1, 16, 8, 8), torch.randn(16, 16 // groups, 3, 3), torch.ones(16)
    geometry = ([1, 1], [1, 1], [1, 1], groups)
    ops = torch.ops.wnfused_native
    y, norm = ops.conv(x, v, g, None, None, *geometry, 2, 0.0)
    dy = torch.randn(y.shape).where(y > 0, math.inf)
    for needs in (1, 15):  # dx alone, and everything
        found = ops.conv_backward(dy, y, x, v, g, norm, needs, *geometry, 2, 0.0)
        assert all(t.isfinite().all() for t in found if t is not None)
