"""Transposed convolutions that the C++ kernels multiply directly, against float64."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS
from own_conv import (
    LAYOUTS,
    Case,
    assert_close,
    assert_layouts_agree,
    assert_not_finite_as_torch,
    assert_only_what_is_needed,
    assert_same_bits_by_threads,
    both,
    run,
    sample,
    way_of,
)

import wnfused
from wnfused.backends import native, native_composed

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 64 * 2.0**-24


def transposed(images, inputs, outputs, size, kernel, stride, padding, dilation, output_padding=(0, 0, 0)) -> Case:
    return Case(images, inputs, outputs, size, kernel, stride, padding, dilation, True, output_padding)


CASES = {
    "twice as large": transposed(2, 32, 16, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1)),
    "ragged blocks": transposed(3, 20, 23, (4, 5), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
    "1x1": transposed(2, 16, 32, (5, 7), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, many outputs": transposed(2, 24, 136, (13, 12), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, stride 2": transposed(2, 16, 16, (5, 4), (1, 1), (2, 2), (0, 0), (1, 1), (1, 0)),
    "3x3": transposed(1, 16, 16, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    "uneven, dilated": transposed(2, 17, 31, (6, 5), (4, 3), (1, 3), (2, 0), (2, 1), (0, 2)),
    "many small images": transposed(24, 16, 16, (3, 2), (3, 3), (1, 1), (0, 0), (1, 1)),
    "three dims": transposed(2, 24, 16, (3, 4, 5), (4, 3, 2), (2, 1, 2), (1, 1, 0), (1, 2, 1), (1, 0, 1)),
    "three dims, twice as large": transposed(2, 32, 16, (3, 4, 3), (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1)),
    "weights packed group by group": transposed(1, 256, 272, (8, 9), (4, 4), (2, 2), (1, 1), (1, 1)),
    "one dim, weights packed group by group": transposed(2, 272, 250, (40,), (8,), (4,), (2,), (1,)),
    "one dim": transposed(2, 48, 24, (21,), (8,), (4,), (2,), (1,)),
    "one dim, vocoder": transposed(1, 32, 16, (40,), (16,), (8,), (4,), (1,)),
    "one dim, stride beyond the kernel": transposed(1, 16, 16, (9,), (2,), (3,), (0,), (1,)),
}
SOME = [CASES[name] for name in ("ragged blocks", "one dim", "three dims")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_window_and_layout(vectors, case, layout):
    if len(case.size) == 1 and layout != "nchw":
        pytest.skip("channels_last is of two dims and three")
    assert way_of(case) == "direct"
    tensors = sample(case, layout)
    assert_layouts_agree(case, tensors, TOLERANCE)
    # Not composed of torch's convolution, in either direction.
    with patch.object(torch, "convolution", side_effect=AssertionError), patch.object(native_composed, "masked", None):
        run(native.conv, native.conv_backward, case, tensors, tensors[4], "relu")


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_what_is_needed(needs, case):
    assert_only_what_is_needed(case, needs, TOLERANCE)


def each(dims: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[values] * dims)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.integers(1, 3))
    counts = (draw(st.integers(1, 18)), draw(st.integers(6, 40)), draw(st.integers(6, 40)))
    kernel, stride, padding, dilation = (draw(each(dims, st.integers(*r))) for r in ((1, 5), (1, 3), (0, 3), (1, 3)))
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    return transposed(*counts, draw(each(dims, st.integers(1, 9))), kernel, stride, padding, dilation, extra)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=cases(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    activation=st.sampled_from(["none", "relu", "leaky_relu"]),
    isa_name=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)
def test_drawn_windows(case, layout, activation, isa_name, seed):
    assume(min(case.output_size) > 0)
    torch.ops.wnfused_native.set_cpu_isa(isa_name)
    try:
        found, wanted = both(case, sample(case, layout, seed), activation)
    finally:
        torch.ops.wnfused_native.set_cpu_isa("auto")
    assert_close(found, wanted, 4 * TOLERANCE)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_threads_and_runs_change_no_bit(vectors, case):
    assert_same_bits_by_threads(case)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 3, 4], ids=["x", "bias", "residual"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_what_is_not_finite_is_composed(vectors, case, which, value):
    assert_not_finite_as_torch(case, which, value)


def test_a_layer_and_its_gradients():
    """Through the public layer, which calls the kernels without torch's dispatcher."""
    torch.manual_seed(0)
    layer = wnfused.WNConvTranspose1d(32, 16, 8, 4, 2, activation="leaky_relu")
    twin = wnfused.WNConvTranspose1d(32, 16, 8, 4, 2, activation="leaky_relu").double()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, 32, 25, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, wanted = layer(x), twin(wide)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-5, msg=name)
