"""3x3 layers that the C++ kernels take from the vendor's library: every method and instruction set against float64.

Winograd's transforms lose two to three times as much as a direct sum, so bounds are those of the other layers times
four.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from torch import Tensor

from wnfused import reference
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 256 * 2.0**-24
SAME = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
NAMES = ("y", "norm", "dx", "dv", "dg", "db", "dz")

# (images, inputs, outputs, height, width) by method: whole and ragged blocks of 16 channels, more of them in than out
# and the other way, maps that tiles cover and that they do not, panels that are full and that are not.
SHAPES = {
    "direct": [(1, 16, 16, 3, 3), (17, 16, 32, 2, 2), (1, 40, 36, 3, 3), (40, 35, 12, 2, 3), (2, 16, 16, 1, 5)],
    "winograd2": [(1, 64, 64, 5, 8), (3, 32, 16, 6, 5), (1, 12, 23, 6, 6)],
    "winograd4": [(1, 16, 16, 32, 32), (2, 24, 40, 9, 13), (5, 32, 16, 8, 8), (1, 80, 16, 11, 12), (3, 16, 48, 12, 7)],
}
CASES = [(method, shape) for method, shapes in SHAPES.items() for shape in shapes]
LAYOUTS = {"nchw": (False, False), "last": (True, True), "last map": (True, False), "last weight": (False, True)}


def method_of(images: int, inputs: int, outputs: int, height: int, width: int) -> str:
    return torch.ops.wnfused_native.cpu_conv3x3_method(images, inputs, outputs, height, width)


def channels_last(t: Tensor, wanted: bool) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if wanted else t


def sample(shape, layout="nchw", seed=0) -> list[Tensor]:
    """x, v, g, bias, residual."""
    images, inputs, outputs, height, width = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    last_map, last_weight = LAYOUTS[layout]
    x = channels_last(normal(images, inputs, height, width), last_map)
    v = channels_last(normal(outputs, inputs, 3, 3), last_weight)
    residual = channels_last(normal(images, outputs, height, width), last_map)
    return [x, v, normal(outputs), normal(outputs), residual]


def run(op, backward, tensors, dy, activation, y=None, needs=(True,) * 4) -> dict[str, Tensor]:
    tail = (*SAME, 0, activation, 0.1)
    out, norm = op(*tensors, *tail)
    gradients = backward(dy, out if y is None else y, *tensors[:3], norm, list(needs), *tail)
    return dict(zip(NAMES, (out, norm, *gradients), strict=True))


def both(tensors, activation="relu", needs=(True,) * 4):
    """What the kernels found, and the reference in float64; its masks are read off the output that was found."""
    y = native.conv(*tensors, *SAME, 0, activation, 0.1)[0]
    dy = torch.empty_like(y).copy_(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
    found = run(native.conv, native.conv_backward, tensors, dy, activation, needs=needs)
    wide = [None if t is None else t.double() for t in tensors]
    wanted = run(reference.conv, reference.conv_backward, wide, dy.double(), activation, y.double(), needs)
    return found, wanted


def assert_close(found, wanted):
    for name in NAMES:
        actual, expected = found[name].double(), wanted[name]
        assert actual.shape == expected.shape, name
        error = (actual - expected).norm() / expected.norm().clamp_min(1e-30) if expected.numel() else 0.0
        assert error <= TOLERANCE, f"{name}: {error:.2e}"


@pytest.mark.parametrize(("method", "shape"), CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_method_and_layout(isa, method, shape, layout):
    assert method_of(*shape) == method
    tensors = sample(shape, layout)
    for activation in ("none", "relu", "leaky_relu"):
        found, wanted = both(tensors, activation)
        assert_close(found, wanted)
    plain = torch.nn.functional.conv2d(*tensors[:2], padding=1)
    assert found["y"].stride() == plain.stride()
    assert found["dv"].stride() == tensors[1].stride()


@pytest.mark.parametrize("shape", [shapes[0] for shapes in SHAPES.values()], ids=str)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs, shape):
    for activation, residual in itertools.product(("none", "relu"), (False, True)):
        tensors = sample(shape)
        if not residual:
            tensors[3] = tensors[4] = None
        wanted = (*needs[:2], needs[2] and residual, needs[3] and residual)
        assert_close(*both(tensors, activation, wanted))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(
        st.integers(1, 5), st.integers(8, 40), st.integers(8, 40), st.integers(1, 14), st.integers(1, 14)
    ),
    layout=st.sampled_from(sorted(LAYOUTS)),
    strided=st.booleans(),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa_name=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_drawn_shapes(shape, layout, strided, activation, isa_name, seed):
    tensors = sample(shape, layout, seed)
    if strided:
        tensors[0] = tensors[0].mT.contiguous().mT
        tensors[4] = torch.stack([tensors[4]] * 2, -1).flatten(-2)[..., ::2]
    torch.ops.wnfused_native.set_cpu_isa(isa_name)
    try:
        found, wanted = both(tensors, activation)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    assert_close(found, wanted)


@pytest.mark.parametrize("shape", [shapes[1] for shapes in SHAPES.values()], ids=str)
def test_threads_and_runs_change_no_bit(isa, shape):
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append(both(sample(shape))[0])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in NAMES)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1, 3, 4], ids=["x", "v", "bias", "residual"])
@pytest.mark.parametrize("shape", [shapes[1] for shapes in SHAPES.values()], ids=str)
def test_what_is_not_finite_is_the_vendors(isa, shape, which, value):
    """A transform spreads an infinity over its tile and turns it into NaN; a convolution's neighbours stay finite."""
    tensors = sample(shape)
    tensors[which].view(-1)[7] = value
    found = native.conv(*tensors, *SAME, 0, "leaky_relu", 0.1)[0]
    wanted = reference.conv(*(t.double() for t in tensors), *SAME, 0, "leaky_relu", 0.1)[0]
    if which != 1:  # a weight that is not finite: padding times it is the vendor's affair
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())
    assert not found.isfinite().all()


@pytest.mark.parametrize("shape", [shapes[1] for shapes in SHAPES.values()], ids=str)
def test_gradients_that_are_not_finite(isa, shape):
    x, v, g, bias, _ = sample(shape)
    y, norm = native.conv(x, v, g, bias, None, *SAME, 0, "none")
    dy = torch.randn_like(y)
    dy.view(-1)[3] = float("inf")
    dx, dv, dg, db, _ = native.conv_backward(dy, y, x, v, g, norm, [True] * 4, *SAME, 0, "none")
    wide = (t.double() for t in (dy, y, x, v, g, norm))
    wanted_dx, wanted_dv, *_ = reference.conv_backward(*wide, [True] * 4, *SAME, 0, "none")
    assert torch.equal(dx.isfinite(), wanted_dx.isfinite())
    assert torch.equal(dv.isfinite(), wanted_dv.isfinite())
    assert not dg[0].isfinite()
    assert db[0] == float("inf")


def test_zero_rows_and_gains(isa):
    for shapes in SHAPES.values():
        tensors = sample(shapes[1])
        tensors[1][3] = 0
        tensors[2][5] = 0
        found, wanted = both(tensors)
        assert_close(found, wanted)
        assert not found["dv"][3].any()
        assert not found["dg"][3].any()
        assert found["dg"][5].abs() > 0


@pytest.mark.parametrize(
    "shape", [(1, 1, 16, 32, 32), (1, 512, 512, 4, 4), (8, 2, 2, 16, 16), (0, 16, 16, 8, 8), (1, 16, 16, 0, 8),
              (0, 0, 0, 0, 0), (64, 64, 64, 512, 512)],
    ids=str,
)  # fmt: skip
def test_what_is_left_to_the_vendor(shape):
    """Mostly padding; few products to a weight; no images; copies of more than 1 GB."""
    assert method_of(*shape) == "vendor"


def test_errors_are_a_few_times_those_of_a_direct_sum():
    tensors = sample((2, 64, 64, 32, 32))
    tensors[3:] = [None, None]
    found, wanted = both(tensors, "none")
    scale = tensors[2] / tensors[1].flatten(1).norm(dim=1)
    w = scale[:, None, None, None] * tensors[1]
    direct = torch.nn.functional.conv2d(tensors[0], w, padding=1)
    error, usual = ((y.double() - wanted["y"]).norm() for y in (found["y"], direct))
    assert error <= 8 * usual
