"""Convolutions normalised along another dim than their rows: the C++ kernels take the effective weight as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_conv import NAMES, Case, assert_close, channels_last, method_of, same3x3, sample

from wnfused import reference
from wnfused.backends import native, native_composed, native_norm

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

TOLERANCE = 4 * 64 * 2.0**-24

CASES = {
    "winograd": same3x3(2, 24, 32, 11, 12),
    "winograd, three dims": same3x3(2, 16, 24, 3, 8, 7),
    "window, three dims": Case(2, 16, 32, (5, 6, 7), (3, 3, 2), (2, 1, 2), (1, 1, 0), (1, 1, 1)),
    "window": Case(2, 16, 32, (12, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    "1x1": Case(3, 32, 48, (8, 8), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, many inputs": Case(3, 136, 40, (11, 17), (1, 1), (1, 1), (0, 0), (1, 1)),
    "an image": Case(2, 3, 24, (12, 9), (5, 4), (2, 2), (2, 1), (1, 1)),
    "a position's": Case(2, 64, 64, (40,), (128,), (1,), (64,), (1,), groups=4),
    "depthwise": Case(2, 24, 24, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1), groups=24),
    "the vendor's": Case(2, 16, 2, (9, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    "transposed": Case(2, 32, 16, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), True),
    "transposed, three dims": Case(2, 24, 16, (3, 4, 5), (4, 3, 2), (2, 1, 2), (1, 1, 0), (1, 2, 1), True, (1, 0, 1)),
    "transposed, few pixels": Case(2, 48, 20, (2, 2), (4, 4), (2, 2), (1, 1), (1, 1), True),
    "transposed, few channels": Case(2, 24, 3, (9, 8), (4, 4), (2, 2), (1, 1), (1, 1), True),
    "transposed, grouped": Case(2, 32, 32, (5, 6), (4, 4), (2, 2), (1, 1), (1, 1), True, groups=2),
}


def window_of(case: Case, *activation: float) -> tuple[Any, ...]:
    """As the ops of a plain weight take it."""
    stride, padding, dilation, _, output_padding, groups = case.geometry
    extra = (output_padding,) if case.transposed else ()
    return (stride, padding, dilation, *extra, groups, *(activation or (0, 0.0)))


def plain(case: Case) -> Any:
    ops = torch.ops.wnfused_native
    return ops.plain_conv_transpose if case.transposed else ops.plain_conv


def plain_backward(case: Case) -> Any:
    ops = torch.ops.wnfused_native
    return ops.plain_conv_transpose_backward if case.transposed else ops.plain_conv_backward


def tensors_of(case: Case, dim: int | None, last: bool = False) -> list[torch.Tensor]:
    """x, v, g, bias, residual; with a zero row of v, and a zero gain."""
    tensors = [channels_last(t, last) for t in sample(case)]
    v = tensors[1]
    shape = [1] * v.dim() if dim is None else [n if d == dim % v.dim() else 1 for d, n in enumerate(v.shape)]
    g = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    if dim is not None and v.shape[dim] > 2:
        v.select(dim, 0).zero_()
        g.view(-1)[1] = 0
    return [tensors[0], v, g, *tensors[3:]]


@pytest.mark.parametrize("activation", ["none", "leaky_relu"])
@pytest.mark.parametrize("dim", [None, 1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(vectors, case, dim, activation):
    x, v, g, bias, residual = tensors_of(case, dim, last=dim == 1)
    rest = (*case.geometry, dim, activation, 0.25)
    y, norm = native.conv(x, v, g, bias, residual, *rest)
    wide = [t.double() for t in (x, v, g, bias, residual)]
    wanted_y, wanted_norm = reference.conv(*wide, *rest)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    needs = [True, True, True, True]
    found = native.conv_backward(dy, y, x, v, g, norm, needs, *rest)
    # The kernel's own y, so that both have passed the same side of the activation.
    wanted = reference.conv_backward(dy.double(), y.double(), *wide[:3], wanted_norm, needs, *rest)
    pairs = ((y, norm, *found), (wanted_y, wanted_norm, *wanted))
    given, true = (dict(zip(NAMES, tensors, strict=True)) for tensors in pairs)
    assert_close(given, true, TOLERANCE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_take_what_they_take_of_rows(case):
    x, v, _, bias, residual = tensors_of(case, None)
    found = plain(case)(x, v, bias, residual, *window_of(case))
    assert (found is None) == (method_of(case) == "vendor")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "name", ["winograd", "window", "an image", "transposed", "transposed, few pixels", "transposed, few channels"]
)
def test_what_is_not_finite_is_the_vendors(vectors, name, value):
    case = CASES[name]
    x, v, _, bias, residual = tensors_of(case, None)
    window, first = window_of(case), x.view(-1)[7].item()
    y = plain(case)(x, v, bias, residual, *window)
    if y is None:
        pytest.skip("the vendor's with this instruction set")
    x.view(-1)[7] = value
    y_found = plain(case)(x, v, bias, residual, *window)
    assert y_found is None or name == "transposed, few channels"  # strips meet no padding
    x.view(-1)[7] = first
    dy = torch.ones_like(y)
    dy.view(-1)[3] = value
    assert not plain_backward(case)(dy, y, x, v, 7, *window)[0]
    dy.fill_(1)
    v.view(-1)[5] = value
    assert plain(case)(x, v, bias, residual, *window) is None
    assert not plain_backward(case)(dy, y, x, v, 7, *window)[0]


@pytest.mark.parametrize("name", ["window", "transposed", "transposed, few pixels", "transposed, few channels"])
@pytest.mark.parametrize("needs", [1, 2, 3, 6, 7, 15])
def test_only_what_is_needed(needs, name):
    case = CASES[name]
    x, v, _, bias, residual = tensors_of(case, None)
    window = window_of(case, 1, 0.0)
    y = plain(case)(x, v, bias, residual, *window)
    if y is None:
        pytest.skip("the vendor's with this instruction set")
    done, *found = plain_backward(case)(torch.ones_like(y), y, x, v, needs, *window)
    assert done
    assert [gradient is not None for gradient in found] == [bool(needs & 1 << i) for i in range(4)]


def test_wrong_arguments_of_transposed_ones_are_refused():
    case = CASES["transposed"]
    x, w, _, bias, residual = tensors_of(case, None)
    window = window_of(case, 1, 0.0)
    y = plain(case)(x, w, bias, residual, *window)
    with pytest.raises(RuntimeError, match="bias"):
        plain(case)(x, w, torch.ones(17), None, *window)
    with pytest.raises(RuntimeError, match="residual"):
        plain(case)(x, w, None, y[:1], *window)
    with pytest.raises(RuntimeError, match="entries"):
        plain(case)(x, w, None, None, [2], *window[1:])
    with pytest.raises(RuntimeError, match="dy"):
        plain_backward(case)(y[:, :8], y, x, w, 7, *window)
    assert plain(case)(x.double(), w.double(), None, None, *window) is None
    assert plain(case)(x, w.bfloat16(), None, None, *window) is None


def test_wrong_arguments_are_refused():
    x, v = torch.randn(2, 16, 8, 8), torch.randn(32, 16, 3, 3)
    window = ([1, 1], [1, 1], [1, 1], 1, 1, 0.0)
    ops = torch.ops.wnfused_native
    y = ops.plain_conv(x, v, None, None, *window)
    with pytest.raises(RuntimeError, match="bias"):
        ops.plain_conv(x, v, torch.ones(31), None, *window)
    with pytest.raises(RuntimeError, match="residual"):
        ops.plain_conv(x, v, None, y[:1], *window)
    with pytest.raises(RuntimeError, match="entries"):
        ops.plain_conv(x, v, None, None, [1], [1], [1], 1, 1, 0.0)
    with pytest.raises(RuntimeError, match="dy"):
        ops.plain_conv_backward(y[:, :16], y, x, v, 7, *window)
    with pytest.raises(RuntimeError, match=r"\by\b"):
        ops.plain_conv_backward(y, y[:1], x, v, 7, *window)
    assert ops.plain_conv(x.double(), v.double(), None, None, *window) is None


@pytest.mark.parametrize("name", ["a position's", "transposed"])
def test_composed_layers_use_them(monkeypatch, name):
    """Else the tests above would see the vendor's products."""
    case, dim = CASES[name], 1 if name == "transposed" else 2
    x, v, g, bias, residual = tensors_of(case, dim)
    monkeypatch.setattr(torch, "convolution", None)
    y, norm = native_composed.conv(x, v, g, bias, residual, *case.geometry, dim, "none", 0.0)
    native_composed.conv_backward(y, y, x, v, g, norm, [True] * 4, *case.geometry, dim, "none", 0.0)
    monkeypatch.undo()
    assert y.shape == residual.shape
    assert norm.shape == (v.shape[dim],)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gradient_by_the_weight_does_not_read_the_weight(vectors, case, value):
    x, v, _, _, residual = tensors_of(case, None)
    v.view(-1)[5] = value
    dy = torch.randn(residual.shape)
    done, _, dw, _, _ = plain_backward(case)(dy, dy, x, v, 2, *window_of(case))
    if done:
        given = (dy, x, torch.zeros_like(v), None, *case.geometry, [False, True, False])
        torch.testing.assert_close(dw, torch.ops.aten.convolution_backward(*given)[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_the_format_of_the_output_follows_a_channels_last_weight(dim, dtype):
    x, v, g, _, _ = (None if t is None else t.to(dtype) for t in tensors_of(CASES["winograd"], dim))
    v = v.contiguous(memory_format=torch.channels_last)
    given = (x, v, g, None, None, *CASES["winograd"].geometry, dim, "none", 0.01)
    torch.library.opcheck(torch.ops.wnfused.conv.default, given, test_utils="test_faketensor")


def test_a_weight_that_is_channels_last_but_for_a_dim_of_one_entry():
    v = torch.randn(1, 5, 3, 115).permute(1, 3, 2, 0)
    assert v.is_contiguous(memory_format=torch.channels_last)
    g = torch.ones(5)
    torch.testing.assert_close(native_norm.weight_norm(v, g)[0], reference.weight_norm(v, g)[0])
