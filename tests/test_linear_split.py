"""Linear layers in float32 on tiles, each number as three bfloat16 (`csrc/cpu/products/gemm_tiles.h`), entry by entry.

Pieces lose what is small beside the rest of its row, and all of a row that is small itself: such calls are multiplied
as floats. So every entry of every product is as exact as a sum of floats, whatever the sizes of its rows and columns.
"""

import copy

import pytest
import torch
from test_layer_native import NAMES, TOLERANCE, assert_close, both, linear_sample

import wnfused
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# About a chunk of the depth (64), the rows of a panel (64) and of an item (256), the lanes of a group (256), a tile.
SHAPES = [(16, 256, 256), (17, 257, 300), (40, 320, 261), (65, 256, 321), (270, 300, 256)]

EPSILON = 2.0**-24
SUMS = 8  # roundings of sums and of the split, in the mean


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
def test_shapes(isa, shape, activation):
    assert_close(*both(linear_sample(*shape), (), activation, 0.2))


@pytest.mark.parametrize("rows", [20, 70])
def test_a_layer(isa, rows):
    layer = wnfused.WNLinear(256, 270, activation="relu")
    x = torch.randn(rows, 256, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    wide, x64 = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    # A sum that is 0 but for its rounding has either sign: the mask is the found output's.
    expected = torch.autograd.grad(wide(x64), [x64, *wide.parameters()], (dy * (y > 0)).double())
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= TOLERANCE[torch.float32] * other.norm()


def entrywise(x, v, g, dy):
    """The products of float64, and what their entries' errors are measured by: the same of absolute values."""
    length = v.norm(dim=1, keepdim=True)
    w = torch.where(length > 0, v * (g / length), 0.0)
    y, dx, dw = x @ w.T, dy @ w, dy.T @ x
    sizes = (x.abs() @ w.abs().T, dy.abs() @ w.abs(), dy.abs().T @ x.abs())
    unit = torch.where(length > 0, v / length, 0.0)
    scale = torch.where(length > 0, g / length, 0.0)
    dv = scale * (dw - unit * (dw * unit).sum(1, keepdim=True))
    of_dv = scale.abs() * (sizes[2] + unit.abs() * (sizes[2] * unit.abs()).sum(1, keepdim=True))
    return (y, dx, dv), (*sizes[:2], of_dv)


def scaled(parts, size):
    """Tensors x, v, g, dy of some of which a row, a column or all is of another size."""
    torch.manual_seed(1)
    x, v, g, _, _ = linear_sample(33, 280, 262)
    dy = torch.randn(33, 262)
    tensors = {"x": x, "v": v, "g": g, "dy": dy}
    for part in parts.split(", "):
        name, *where = part.split()
        target = tensors[name]
        if not where:
            target *= size
        elif where == ["row"]:
            target[7] *= size
        else:
            target[:, 5] *= size
    return x, v, g, dy


# With one operand of a product alone, or with both.
PARTS = [
    "x", "x row", "x column", "v", "v row", "v column", "g", "g row", "dy", "dy row", "dy column",
    "x, dy", "x column, dy", "x, dy column", "x column, dy column", "dy, g", "dy row, g", "dy, v column",
    "x, v", "x row, v",
]  # fmt: skip


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-17, 1e-12, 1e-6, 1e6, 1e12, 1e17], ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_every_entry_is_as_exact_as_a_sum_of_floats(isa, parts, size):
    x, v, g, dy = scaled(parts, size)
    if "v" in parts and size < 1e-20:
        pytest.skip("squares below the least float: a norm of zero in every kernel")
    y, norm = native.linear(x, v, g, None, None, 0, "none")
    dx, dv, *_ = native.linear_backward(dy, y, x, v, g, norm, [True, True, True, False], 0, "none")
    expected, sizes = entrywise(x.double(), v.double(), g.double(), dy.double())
    for name, found, wanted, sums in zip(("y", "dx", "dv"), (y, dx, dv), expected, sizes, strict=True):
        # Below the least normal number floats have no such precision.
        allowed = 12 * SUMS * EPSILON * sums + 2.0**-140
        assert ((found.double() - wanted).abs() <= allowed).all(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e37], ids=str)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_what_has_no_pieces(isa, value, where):
    tensors, dy = linear_sample(20, 256, 260), torch.randn(20, 260)
    {"x": tensors[0], "dy": dy}[where][3, 5] = value
    found, expected = both(tensors, (), "none", dy=dy)
    for name in ("y", "dx", "db"):
        wanted = expected[name]
        assert torch.equal(found[name].isfinite(), wanted.isfinite()), name
        # The other entries are what they would be.
        beside = wanted.isfinite() & (wanted.abs() < 1e30)
        assert beside.any(), name
        error = (found[name].double() - wanted)[beside].norm()
        assert error <= TOLERANCE[torch.float32] * wanted[beside].norm(), name


def test_no_less_exact_than_vectors():
    isas = torch.ops.wnfused_native.cpu_isas().split(",")
    if not {"amx", "avx512"} <= set(isas):
        pytest.skip("tiles and vectors are not both here")
    tensors, dy = linear_sample(200, 600, 300), torch.randn(200, 300)
    errors = []
    try:
        for name in ("amx", "avx512"):
            torch.ops.wnfused_native.set_cpu_isa(name)
            found, expected = both(tensors, (), "none", dy=dy)
            errors.append([(found[n].double() - expected[n]).norm() for n in ("y", "dx", "dv", "dg")])
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    assert all(tiles < vectors for tiles, vectors in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_same_bits_for_any_number_of_threads(isa, threads):
    before = torch.get_num_threads()
    tensors, dy = linear_sample(150, 300, 270), torch.randn(150, 270)
    if not isa.startswith("amx"):
        pytest.skip("not by tiles")
    try:
        torch.set_num_threads(1)
        alone = both(tensors, dy=dy)[0]
        torch.set_num_threads(threads)
        found = both(tensors, dy=dy)[0]
    finally:
        torch.set_num_threads(before)
    for name in NAMES:
        assert torch.equal(found[name], alone[name]), name
