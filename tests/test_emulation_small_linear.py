"""The CUDA kernels of linear layers of few samples, emulated on the host, against the reference in float64."""

import pytest
import torch
from emulator import Guarded, emulation, tensor_of

from wnfused import reference

# Samples, rows, columns: the fewest, whole tiles, and remainders of samples, rows and columns; more of each than a warp
# or a block takes in one step, and than is on its way at once.
SHAPES = [
    (1, 4, 8), (16, 8, 32), (3, 12, 40), (17, 20, 264), (33, 36, 56), (32, 8, 1032), (256, 16, 64), (250, 12, 72),
    (5, 300, 48), (2, 8, 4096), (70, 12, 520), (3, 1036, 40), (40, 12, 2056),
]  # fmt: skip
# The product's kind, and the dtypes of v and of x.
KINDS = [
    ("bfloat16", torch.float32, torch.bfloat16), ("bfloat16", torch.bfloat16, torch.bfloat16),
    ("tf32", torch.float32, torch.float32), ("float32", torch.float32, torch.float32),
]  # fmt: skip
IDS = ["bfloat16", "bfloat16 parameters", "tf32", "float32"]


@pytest.fixture(scope="module")
def module():
    return emulation()


# Of the backward: what it is asked for, which decides how many blocks are whose.
WANTED = [("dx", "dv", "dg", "dbias"), ("dx",), ("dv", "dg", "dbias"), ("dv", "dg")]


def drawn(shape, wide, narrow):
    samples, rows, columns = shape
    x, v = torch.randn(samples, columns).to(narrow), torch.randn(rows, columns).to(wide)
    v[1].zero_()
    g, bias, residual = torch.rand(rows) + 0.5, torch.randn(rows), torch.randn(samples, rows).to(narrow)
    return x, v, g.to(wide), bias, residual, torch.randn(samples, rows).to(narrow)


class Found:
    """What the kernels make of a layer, and the faults that the machine saw."""

    def __init__(self, module, kind, x, v, g, bias, residual, dy, activates, slope, reverse=False, wanted=WANTED[0]):
        guarded = Guarded()
        given = [None if t is None else guarded.array(t) for t in (x, v, g, bias, residual)]
        y, norm = guarded.output(dy), guarded.output(g.float())
        self.faults = module.small_linear(kind, *given, y, norm, activates, slope, reverse)
        dx, dv, dg, dbias = (
            None if t is None or name not in wanted else guarded.output(t)
            for name, t in zip(WANTED[0], (x, v, g, bias), strict=True)
        )  # fmt: skip
        arrays = (guarded.array(dy), y, *given[:3], norm, dx, dv, dg, dbias)
        self.faults += module.small_linear_backward(kind, *arrays, activates, slope, reverse)
        self.faults += guarded.faults()
        names = ("y", "norm", "dx", "dv", "dg", "dbias")
        found = zip(names, (y, norm, dx, dv, dg, dbias), strict=True)
        self.values = {name: tensor_of(array) for name, array in found if array is not None}


def expected(x, v, g, bias, residual, dy, activation, slope, y):
    """By the reference in float64; the mask is that of the y that was found."""
    wide = [None if t is None else t.double() for t in (x, v, g, bias, residual)]
    true, norm = reference.linear(*wide, 0, activation, slope)
    mask = torch.ones_like(true) if activation == "none" else torch.where(y.double() > 0, 1.0, slope)
    dz = dy.double() * mask
    dw = dz.T @ wide[0]
    dv, dg = reference.weight_norm_backward(dw, wide[1], wide[2], norm, 0)
    w = reference.weight_norm(wide[1], wide[2], 0)[0]
    return {
        "y": true, "norm": norm.reshape(-1), "dx": dz @ w, "dv": dv, "dg": dg.reshape(-1), "dbias": dz.sum(0),
    }  # fmt: skip


EPS = {"bfloat16": 2**-8, "tf32": 2**-10, "float32": 2**-21}


def faults_of(found, true, kind):
    faults = list(found.faults)
    for name, value in found.values.items():
        exact = name in ("norm", "dbias")  # of no product
        eps = EPS["float32"] if exact and value.dtype == torch.float32 else EPS[kind]
        scale = max(true[name].abs().max().item(), 1.0)
        if not torch.allclose(value.double(), true[name], rtol=2 * eps, atol=2 * eps * scale):
            faults.append(f"{name} is off by {(value.double() - true[name]).abs().max():.2g} of {scale:.2g}")
    return faults


def check_layer(module, shape, kind, wide, narrow, activation, slope, reverse=False):
    """What is wrong with a layer and its gradients."""
    x, v, g, bias, residual, dy = drawn(shape, wide, narrow)
    found = Found(module, kind, x, v, g, bias, residual, dy, activation != "none", slope, reverse)
    faults = faults_of(found, expected(x, v, g, bias, residual, dy, activation, slope, found.values["y"]), kind)
    if found.values["dv"][1].count_nonzero() or found.values["dg"][1] != 0:
        faults.append("a zero row has a gradient")
    return faults


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(("kind", "wide", "narrow"), KINDS, ids=IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_and_gradients(module, shape, kind, wide, narrow, reverse):
    number = SHAPES.index(shape) + KINDS.index((kind, wide, narrow)) + reverse
    activation, slope = (("none", 0.0), ("relu", 0.0), ("leaky_relu", 0.1))[number % 3]
    assert check_layer(module, shape, kind, wide, narrow, activation, slope, reverse) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_bias_of_either_dtype_or_none(module, dtype, residual):
    x, v, g, bias, added, dy = drawn((9, 12, 40), torch.float32, torch.bfloat16)
    bias, added = None if dtype is None else bias.to(dtype), added if residual else None
    found = Found(module, "bfloat16", x, v, g, bias, added, dy, True, 0.0)
    assert ("dbias" in found.values) == (dtype is not None)
    true = expected(x, v, g, bias, added, dy, "relu", 0.0, found.values["y"])
    assert faults_of(found, true, "bfloat16") == []


@pytest.mark.parametrize("wanted", WANTED[1:], ids=str)
@pytest.mark.parametrize(("kind", "wide", "narrow"), KINDS, ids=IDS)
@pytest.mark.parametrize("shape", [(33, 20, 56), (33, 20, 520), (9, 12, 1032)], ids=str)
def test_gradients_are_the_same_alone(module, shape, kind, wide, narrow, wanted):
    given = drawn(shape, wide, narrow)
    together, alone = (Found(module, kind, *given, True, 0.1, wanted=names) for names in (WANTED[0], wanted))
    assert together.faults == alone.faults == []
    assert set(alone.values) == {"y", "norm", *wanted}
    assert all(torch.equal(value, together.values[name]) for name, value in alone.values.items())


@pytest.mark.parametrize(("kind", "wide", "narrow"), KINDS, ids=IDS)
def test_the_bits_are_the_same_whichever_warp_goes_first(module, kind, wide, narrow):
    given = drawn((40, 20, 520), wide, narrow)
    one, other = (Found(module, kind, *given, True, 0.1, reverse) for reverse in (False, True))
    assert all(torch.equal(value, other.values[name]) for name, value in one.values.items())


HUGE = 3.4e38


@pytest.mark.parametrize("where", ["x", "v", "dy"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), HUGE])
@pytest.mark.parametrize(("kind", "wide", "narrow"), KINDS, ids=IDS)
def test_what_is_not_finite_is_where_the_reference_has_it(module, kind, wide, narrow, value, where):
    x, v, g, bias, _, dy = drawn((5, 12, 40), wide, narrow)
    v[1] = 1.0  # a zero row takes no gradient, and has no product
    {"x": x, "v": v, "dy": dy}[where][3, 2] = value
    found = Found(module, kind, x, v, g, bias, None, dy, False, 0.0)
    assert found.faults == []
    # In float32, where the squares of huge entries are infinite, too.
    tensors = [t.float() for t in (x, v, g, bias)]
    y, norm = reference.linear(*tensors, None, 0, "none", 0.0)
    w, _ = reference.weight_norm(*tensors[1:3], 0)
    dv, dg = reference.weight_norm_backward(dy.float().T @ tensors[0], *tensors[1:3], norm, 0)
    true = {"y": y, "dx": dy.float() @ w, "dv": dv, "dg": dg.reshape(-1), "dbias": dy.float().sum(0)}
    # What is huge makes gradients overflow or not by the order of their operations.
    names = ("y",) if abs(value) == HUGE else tuple(true)
    for name in names:
        found_there, wanted = found.values[name], true[name].to(found.values[name].dtype)
        assert torch.equal(found_there.isfinite(), wanted.isfinite()), name
