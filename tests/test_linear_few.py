"""Linear layers of floats with few features or few inputs (`csrc/cpu/linear/few.h`)."""

import itertools

import pytest
import torch
from instruction_sets import ISAS
from test_layer_native import assert_close, both, linear_sample

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# (M, K, N): heads with every last tile of rows, and with inputs about whole blocks; layers of few inputs with every
# last tile, and features about whole blocks; neither; rows in several pieces and shares.
HEADS = [
    *((rows, 20, 3) for rows in (*range(1, 10), 15, 16, 17, 33)),
    *((19, inner, features) for inner in (5, 15, 16, 17, 64, 65) for features in (1, 2, 3, 4)),
    (40, 20, 5), (700, 300, 2), (4100, 40, 1),
]  # fmt: skip
OF_FEW_INPUTS = [
    *((rows, 3, 33) for rows in (*range(1, 10), 17)),
    *((19, inner, features) for inner in (1, 2, 3, 4) for features in (16, 17, 32, 47)),
    (40, 5, 40), (19, 3, 2), (19, 2, 15), (700, 1, 300), (4100, 2, 70),
]  # fmt: skip
SHARED = [(700, 300, 2), (4100, 40, 1), (700, 1, 300), (4100, 2, 70)]


@pytest.mark.parametrize("shape", HEADS + OF_FEW_INPUTS, ids=str)
@pytest.mark.parametrize(("activation", "slope"), [("none", 0.0), ("relu", 0.0), ("leaky_relu", 0.2)])
def test_shapes_about_the_limits(isa, shape, activation, slope):
    found, expected = both(linear_sample(*shape), (), activation, slope)
    if shape[2] == 1:  # a single number, of terms that cancel
        for name in ("dg", "db"):
            torch.testing.assert_close(found.pop(name).double(), expected.pop(name), rtol=1e-4, atol=1e-3)
    if shape[1] == 1:
        expected.pop("dv")
        assert found.pop("dv").eq(0).all()  # there is nothing beside the direction of a single input
    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=4)), ids=str)
@pytest.mark.parametrize("shape", [(40, 100, 3), (40, 3, 100)], ids=str)
def test_gradients_that_are_not_needed(isa, needs, shape):
    assert_close(*both(linear_sample(*shape), (), "relu", needs=needs), torch.float32)


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_the_bits_do_not_depend_on_the_number_of_threads(isa, shape, threads):
    x, v, g, bias, residual = linear_sample(*shape)
    found = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        y, norm = torch.ops.wnfused_native.linear(x, v, g, bias, residual, 1, 0.0)
        gradients = torch.ops.wnfused_native.linear_backward(residual, y, x, v, g, norm, 31, 1, 0.0)
        found.append((y, norm, *gradients))
    if isa == "portable" and shape[1] < 5:  # whose forward is the vendor's
        found = [tensors[1:] for tensors in found]
    for tensors in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(tensors, found[0], strict=True))


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("sizes", [(40, 2), (90, 3)], ids=str)
@pytest.mark.parametrize(("x_size", "v_size", "gain"), [(1e25, 1e15, 1.0), (1e-30, 1e-20, 1e10), (1.0, 1e-3, 1e6)])
def test_outputs_have_the_range_of_an_un_normalised_layer(isa, sizes, x_size, v_size, gain):
    inner, features = sizes
    x, v, _, _, _ = linear_sample(30, inner, features)
    x, v, g = x * x_size, v * v_size, torch.full((features,), gain)
    wide = [t.double() for t in (x, v, g)]
    expected = wide[0] @ (wide[1] * (wide[2] / wide[1].norm(dim=1)).unsqueeze(1)).T
    y, norm = torch.ops.wnfused_native.linear(x, v, g, None, None, 0, 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().mean().item())
    torch.testing.assert_close(norm.double(), wide[1].norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", [(30, 4), (4, 30)], ids=str)
def test_rows_of_zeros_and_infinite_entries(isa, sizes):
    """A row of zeros gets no gradient, be it infinite; an infinite entry of x meets its own row alone."""
    inner, features = sizes
    x, v, g, bias, dy = linear_sample(20, inner, features)
    v[1] = 0
    x[5, 2] = float("inf")
    y, norm = torch.ops.wnfused_native.linear(x, v, g, bias, None, 0, 0.0)
    rest = [row for row in range(20) if row != 5]
    assert norm[1] == 0
    assert torch.equal(y[rest, 1], bias[1].expand(19))
    assert y[rest].isfinite().all()
    assert not y[5, [0, 2, 3]].isfinite().any()
    dx, dv, dg, _, _ = torch.ops.wnfused_native.linear_backward(dy, y, x, v, g, norm, 15, 0, 0.0)
    assert dx.isfinite().all()
    assert dv[1].eq(0).all()
    assert dg[1] == 0
    assert not dg[[0, 2, 3]].isfinite().any()


@pytest.mark.parametrize("sizes", [(30, 4), (4, 30)], ids=str)
def test_a_slope_of_zero_masks_an_infinite_gradient(isa, sizes):
    x, v, g, bias, dy = linear_sample(20, *sizes)
    y, norm = torch.ops.wnfused_native.linear(x, v, g, bias, None, 2, 0.0)
    dy = torch.where(y <= 0, torch.full_like(dy, float("inf")), dy)
    for gradient in torch.ops.wnfused_native.linear_backward(dy, y, x, v, g, norm, 31, 2, 0.0):
        assert gradient.isfinite().all()
