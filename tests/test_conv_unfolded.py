"""Wide convolutions on few pixels: the kernels of linear layers, over rows that are the map's windows."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_conv import (
    LAYOUTS,
    Case,
    assert_close,
    assert_layouts_agree,
    assert_not_finite_as_torch,
    assert_only_what_is_needed,
    assert_zero_rows_and_gains,
    both,
    channels_last,
    go_by,
    run,
    same3x3,
    sample,
)

import wnfused
from wnfused.backends import native, native_composed

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 32 * 2.0**-24


def layer(counts, size, kernel, stride=1, padding=0, dilation=1) -> Case:
    dims = len(size)
    kernel, stride, padding, dilation = (
        (value,) * dims if isinstance(value, int) else value for value in (kernel, stride, padding, dilation)
    )
    return Case(*counts, size, kernel, stride, padding, dilation)


CASES = {
    "3x3 on 2x2": same3x3(2, 40, 24, 2, 2),
    "3x3 on a pixel": same3x3(3, 17, 33, 1, 1),
    "3x3 on 4x4": same3x3(1, 64, 80, 4, 4),
    "a stride": layer((1, 65, 80), (5, 6), 3, 2, 1),
    "dilated, most windows in the padding": layer((1, 64, 70), (3, 3), 3, 1, (2, 3), (2, 3)),
    "1x1": layer((2, 70, 90), (2, 2), 1),
    "1x1, a stride": layer((2, 64, 80), (3, 4), 1, 2),
    "a dense head": layer((5, 20, 40), (4, 4), 4),
    "one dim": layer((1, 64, 80), (9,), 5, 1, 1),
    "three dims": layer((1, 33, 30), (1, 2, 3), 3, 1, 1),
    "three dims, ragged": layer((1, 67, 72), (2, 3, 2), (1, 2, 3), (1, 2, 1), (0, 1, 2)),
    "many rows": layer((1, 128, 128), (4, 4), 3, 1, 1),
    "patches": layer((2, 3, 40), (24, 36), 12, 12),
    "patches with gaps": layer((1, 2, 24), (13, 29), (12, 13), (13, 16)),
    "transposed, from a pixel": layer((2, 40, 24), (1, 1), 4)._replace(transposed=True),
    "transposed by 2": layer((1, 65, 70), (3, 4), 4, 2, 1)._replace(transposed=True),
    "transposed by 2, ragged": layer((2, 33, 17), (2, 2), 3, 2, 1)._replace(transposed=True, output_padding=(1, 0, 0)),
    "transposed, side by side": layer((2, 64, 40), (2, 2), 2, 2)._replace(transposed=True),
    "transposed, 1x1": layer((2, 40, 24), (2, 2), 1)._replace(transposed=True),
    "transposed, one dim": layer((1, 80, 64), (9,), 16, 8, 4)._replace(transposed=True),
    "transposed, three dims": layer((1, 33, 24), (1, 2, 3), 3, (1, 2, 1), 1)._replace(transposed=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_window_and_layout(vectors, case, layout):
    if len(case.size) == 1 and layout != "nchw":
        pytest.skip("channels_last is of two dims and three")
    assert go_by("unfolded", case, layout != "nchw")[1] == (vectors != "portable")
    tensors = sample(case, layout)
    assert_layouts_agree(case, tensors, TOLERANCE)
    if case.transposed and go_by("unfolded", case, layout != "nchw") == (True, True):
        # Not composed of torch's convolution, in either direction.
        no_product = patch.object(torch, "convolution", side_effect=AssertionError)
        with no_product, patch.object(native_composed, "masked", None):
            run(native.conv, native.conv_backward, case, tensors, tensors[4], "relu")


def test_wide_layers_on_few_pixels_go_this_way(fastest):
    assert go_by("unfolded", same3x3(2, 512, 512, 2, 2)) == (True, True)
    assert go_by("unfolded", same3x3(1, 512, 512, 4, 4)) == (True, True)
    assert go_by("unfolded", same3x3(1, 512, 512, 7, 7)) == (False, False)
    assert (
        go_by("unfolded", same3x3(1, 640, 640, 9, 9))
        == go_by("unfolded", same3x3(1, 640, 640, 9, 9), last=True)
        == (False, False)
    )
    assert go_by("unfolded", layer((1, 2048, 512), (7, 7), 1)) == (False, False)
    for channels in ((3, 64), (64, 16), (2048, 512)):
        assert go_by("unfolded", layer((8, *channels), (28, 28), 1), last=True)[0]
    assert go_by("unfolded", layer((1, 3, 768), (224, 224), 16, 16)) == (False, True)


@pytest.mark.parametrize(
    "case", [same3x3(8, 64, 64, 8, 8), layer((8, 64, 64), (1024,), 3), layer((8, 3, 64), (224, 224), 7, 2, 3)], ids=str
)
def test_others_do_not(fastest, case):
    assert go_by("unfolded", case) == go_by("unfolded", case, last=True) == (False, False)


@pytest.mark.parametrize("outputs", [1, 2, 4])
@pytest.mark.parametrize("size", [(9, 7), (3, 5, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_1x1_layers_of_few_outputs(vectors, outputs, size, layout):
    case = layer((2, 40, outputs), size, 1)
    assert go_by("unfolded", case, last=True) == ((vectors != "portable",) * 2)
    assert_layouts_agree(case, sample(case, layout), 4 * TOLERANCE)  # terms of a single dg cancel


def test_1x1_layers_of_many_weights_to_a_pixel_go_this_way_by_avx2(vectors):
    """On more pixels than other kernels of AVX2 for unfolded layers take: in place, and with a stride."""
    if vectors != "avx2":
        pytest.skip("other bounds")
    assert not go_by("unfolded", layer((8, 256, 64), (28, 28), 1), last=True)[0]
    for case in (layer((1, 270, 280), (8, 9), 1), layer((1, 264, 270), (22, 12), 1, 2)):
        assert go_by("unfolded", case, last=True)[0]
        assert_layouts_agree(case, sample(case, "last"), TOLERANCE)


@pytest.fixture
def fastest():
    if torch.ops.wnfused_native.cpu_isa() not in ("avx512", "avx512_bf16", "amx"):
        pytest.skip("without AVX-512 fewer layers go this way")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_pixel_that_is_not_finite_stays_by_itself_where_pixels_are_rows(value):
    x = torch.randn(2, 40, 5, 6).contiguous(memory_format=torch.channels_last)
    x[1, 7, 2, 3] = value
    v, g = torch.randn(33, 40, 1, 1), torch.rand(33, 1, 1, 1)
    wanted = torch.nn.functional.conv2d(x, v * (g / v.norm(dim=1, keepdim=True)))
    y = native.conv(x, v, g, None, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, 0, "none", 0.0)[0]
    torch.testing.assert_close(y, wanted, equal_nan=True)
    assert y.isfinite().sum() == y.numel() - 33


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
@pytest.mark.parametrize("name", ["3x3 on 2x2", "1x1", "patches", "three dims", "transposed by 2"])
def test_only_what_is_needed(needs, name):
    assert_only_what_is_needed(CASES[name], needs, TOLERANCE)


def each(dims: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[values] * dims)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Of up to eight pixels, or with sixteen of many channels."""
    dims = draw(st.integers(1, 3))
    kernel, stride = draw(each(dims, st.integers(1, 4))), draw(each(dims, st.integers(1, 4)))
    dilation, outputs = draw(each(dims, st.integers(1, 3))), draw(each(dims, st.integers(1, 2)))
    padding = tuple(draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True))
    every = zip(outputs, kernel, stride, padding, dilation, strict=True)
    size = tuple(max(1, (n - 1) * s + d * (k - 1) + 1 - 2 * p + draw(st.integers(0, s - 1))) for n, k, s, p, d in every)
    counts = (draw(st.integers(1, 2)), draw(st.integers(5, 90)), draw(st.integers(5, 90)))
    if draw(st.booleans()):
        return Case(*counts, size, kernel, stride, padding, dilation)
    extra = (*(draw(st.integers(0, s - 1)) for s in stride), 0, 0)[:3]
    case = Case(*counts, outputs, kernel, stride, padding, dilation, transposed=True, output_padding=extra)
    return case if min(case.output_size) > 0 else case._replace(padding=(0,) * dims)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), layout=st.sampled_from(sorted(LAYOUTS)), activation=st.sampled_from(["none", "relu"]))
def test_drawn_layers(vectors, case, layout, activation):
    assert_close(*both(case, sample(case, layout), activation), TOLERANCE)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("name", ["3x3 on 2x2", "1x1", "one dim", "transposed, one dim"])
def test_values_that_are_not_finite(name, which, value):
    assert_not_finite_as_torch(CASES[name], which, value)


@pytest.mark.parametrize("name", ["3x3 on 2x2", "three dims"])
def test_a_gradient_that_is_not_finite_is_not_multiplied_by_padding(name):
    case = CASES[name]
    x, v, g = sample(case)[:3]
    tail = (*case.geometry, 0, "none", 0.1)
    y, norm = native.conv(x, v, g, None, None, *tail)
    dy = torch.ones_like(y)
    dy[(0, 3) + (0,) * len(case.size)] = float("inf")
    dv = native.conv_backward(dy, y, x, v, g, norm, [True, True, False, False], *tail)[1]
    # The first pixel's window begins in the padding.
    plain = torch.ops.aten.convolution_backward(
        dy, x, v, None, *(list(e) for e in (case.stride, case.padding, case.dilation)), False, [0] * len(case.size), 1,
        [False, True, False],
    )[1]  # fmt: skip
    assert not dv[3].isfinite().any()
    assert torch.equal(dv[:3].isfinite(), plain[:3].isfinite())


@pytest.mark.parametrize("name", ["3x3 on 2x2", "three dims", "3x3 on 4x4", "transposed by 2"])
def test_zero_rows_and_gains(vectors, name):
    assert_zero_rows_and_gains(CASES[name], TOLERANCE)


@pytest.mark.parametrize("name", ["3x3 on 4x4", "1x1, a stride", "patches", "transposed by 2"])
def test_maps_that_are_cut_out_of_larger_ones(vectors, name):
    case = CASES[name]
    tensors = sample(case)
    for dims in ((0, 1), (2, 3)):
        wide = torch.randn([2 * n if d in dims else n for d, n in enumerate(tensors[0].shape)])
        every_other = tuple(slice(None, None, 2) if d in dims else slice(None) for d in range(4))
        for x in (wide[every_other], channels_last(wide, True)[every_other]):
            assert_close(*both(case, [x, *tensors[1:]]), TOLERANCE)


def test_a_module_trains_the_same_with_and_without_gradients():
    torch.manual_seed(0)
    module = wnfused.WNConv2d(48, 64, 3, padding=1, activation="relu")
    x = torch.randn(2, 48, 2, 2, requires_grad=True)
    with torch.no_grad():
        still = module(x)
    y = module(x)
    assert torch.equal(y, still)
    y.square().sum().backward()
    wide = wnfused.WNConv2d(48, 64, 3, padding=1, activation="relu").double()
    wide.load_state_dict(module.state_dict())
    x64 = x.detach().double().requires_grad_()
    wide(x64).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-5)
    for ours, wanted in zip(module.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)
