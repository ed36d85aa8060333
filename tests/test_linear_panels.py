"""Linear layers of floats by panels of 16 columns (`csrc/cpu/linear/panel.h`): tiles, parts and chunks."""

import itertools

import pytest
import torch
from instruction_sets import ISAS
from test_layer_native import assert_close, both, linear_sample

from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# (M, K, N): every last tile of rows and every last block of features, a K about 16 and one that is not turned any more;
# few features, so that workers share the rows of x, and columns; more rows or features than a panel has; an x that is
# passed by in chunks.
SHAPES = [
    *((rows, 20, 33) for rows in (*range(1, 18), 23, 24)),
    *((19, 40, features) for features in (1, 2, 15, 16, 17, 31, 32, 47)),
    *((40, inner, 21) for inner in (2, 3, 15, 16, 17, 31, 64, 65)),
    (37, 4096, 18), (37, 4097, 18), (2000, 30, 10), (1999, 300, 17), (530, 3000, 20), (9, 8, 1000), (40, 100, 1100),
    (1030, 200, 70),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "leaky_relu"])
def test_shapes_about_the_limits(isa, shape, activation):
    tensors = linear_sample(*shape)
    assert_close(*both(tensors, (), activation, 0.2), torch.float32)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=4)), ids=str)
def test_gradients_that_are_not_needed(isa, needs):
    assert_close(*both(linear_sample(40, 100, 37), (), "relu", needs=needs), torch.float32)


@pytest.mark.parametrize("shape", [(37, 100, 300), (2000, 30, 10), (1999, 200, 17), (530, 3000, 20)], ids=str)
def test_the_bits_do_not_depend_on_the_number_of_threads(isa, shape, threads):
    """Parts begin where a tile of x, and a block of features, does."""
    if isa in ("portable", "amx-emulated"):  # without panels of its own
        pytest.skip("the vendor multiplies")
    x, v, g, bias, residual = linear_sample(*shape)
    found = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        found.append(torch.ops.wnfused_native.linear(x, v, g, bias, residual, 1, 0.0))
        y, norm = found[-1]
        found[-1] += torch.ops.wnfused_native.linear_backward(residual, y, x, v, g, norm, 15, 1, 0.0)
    for tensors in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(tensors, found[0], strict=True))


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("rows", [12, 600])
@pytest.mark.parametrize(("x_size", "v_size", "gain"), [(1e25, 1e15, 1.0), (1e-30, 1e-20, 1e10), (1.0, 1e-3, 1e6)])
def test_outputs_have_the_range_of_an_un_normalised_layer(isa, rows, x_size, v_size, gain):
    """A product with v itself would overflow, or sink into denormals: it is taken again with w."""
    x, v, _, _, _ = linear_sample(rows, 40, 18)
    x, v, g = x * x_size, v * v_size, torch.full((18,), gain)
    wide = [t.double() for t in (x, v, g)]
    expected = wide[0] @ (wide[1] * (wide[2] / wide[1].norm(dim=1)).unsqueeze(1)).T
    y, norm = torch.ops.wnfused_native.linear(x, v, g, None, None, 0, 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().mean().item())
    torch.testing.assert_close(norm.double(), wide[1].norm(dim=1), rtol=1e-5, atol=0)


def test_rows_of_zeros_and_an_infinite_input(isa):
    x, v, g, bias, _ = linear_sample(20, 30, 19)
    v[3] = 0
    x[5, 7] = float("inf")
    y, norm = torch.ops.wnfused_native.linear(x, v, g, bias, None, 0, 0.0)
    assert norm[3] == 0
    rest = [row for row in range(20) if row != 5]
    assert torch.equal(y[rest, 3], bias[3].expand(19))
    assert y[rest].isfinite().all()
    assert not y[5, [0, 1, 2]].isfinite().any()
