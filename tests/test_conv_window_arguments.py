"""What layers of any window make of odd arguments, formats and gradients: as torch does."""

from __future__ import annotations

import pytest
import torch
from own_conv import Case, sample, way_of
from torch import nn

import wnfused
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

PAIRS = ((wnfused, "WNConv"), (torch.nn, "Conv"))

# A torch layer's arguments, some of which our constructors refuse, and the size of its input.
REFUSED = {
    "stride 0": (nn.Conv2d, (16, 16, 1, 0), (8, 8)),
    "kernel beyond the map": (nn.Conv2d, (16, 16, 5, 2), (4, 4)),
    "kernel beyond the line": (nn.Conv1d, (32, 32, 7, 2), (6,)),
    "negative padding": (nn.Conv2d, (16, 16, 3, 1, (-1, -1)), (8, 8)),
    "dilation 0": (nn.Conv2d, (16, 16, 3, 1, 1, 0), (8, 8)),
    "negative dilation": (nn.Conv2d, (16, 16, 3, 1, 1, -1), (8, 8)),
    "negative stride": (nn.Conv2d, (16, 16, 3, (-5, -3)), (4, 4)),
    "three dims, stride 0": (nn.Conv3d, (16, 16, 1, (0, 1, 1)), (4, 4, 4)),
    "three dims, kernel beyond the levels": (nn.Conv3d, (16, 16, (5, 1, 1)), (4, 4, 4)),
    "transposed, stride 0": (nn.ConvTranspose2d, (16, 16, 3, 0), (4, 4)),
    "transposed, negative padding": (nn.ConvTranspose2d, (16, 16, 3, 1, (-1, -1)), (4, 4)),
    "transposed, dilation 0": (nn.ConvTranspose2d, (16, 16, 3, 1, 0, 0, 1, True, 0), (4, 4)),
    "transposed, negative output padding": (nn.ConvTranspose2d, (16, 16, 3, 2, 0, (-1, -1)), (1, 1)),
}


@pytest.mark.parametrize(("kind", "arguments", "size"), REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused(kind, arguments, size):
    layer = wnfused.convert(kind(*arguments), plain=True)
    assert isinstance(layer, wnfused.nn.WeightNormalised)
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(1, arguments[0], *size))
    with wnfused.frozen(layer):  # which asks for the method too
        pass


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((1, 1), (2**32, 2**32), (0, 0), (1, 1)), ((2, 2), (1, 1), (2**29 - 2,) * 2, (2**30 - 4,) * 2)],
    ids=["stride", "border"],
)
def test_numbers_whose_products_overflow(kernel, stride, padding, dilation):
    case = Case(1, 16, 16, (4, 4), kernel, stride, padding, dilation)
    assert way_of(case) == "vendor"


def maps_in_many_formats():
    wide = torch.randn(2, 64, 5, 6).contiguous(memory_format=torch.channels_last)
    yield "a chunk of channels", wide[:, :32]
    yield "every other line", wide[:, :32, ::2]
    yield "every other column", torch.randn(2, 32, 5, 12)[..., ::2]
    yield "an image's only pixel", torch.randn(3, 32, 1, 1)
    yield "a pixel, channels_last", torch.randn(3, 32, 1, 1).contiguous(memory_format=torch.channels_last)
    yield "a line, channels_last", torch.randn(1, 32, 1, 7).contiguous(memory_format=torch.channels_last)
    yield "transposed", torch.randn(2, 32, 6, 5).mT
    yield "permuted", torch.randn(2, 5, 6, 32).permute(0, 3, 1, 2)
    yield "expanded", torch.randn(1, 32, 5, 6).expand(2, -1, -1, -1)


@pytest.mark.parametrize(("name", "x"), list(maps_in_many_formats()), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("last_weight", [False, True])
@pytest.mark.parametrize("kind", ["1x1", "stride 2", "depthwise", "transposed"])
def test_formats_are_torchs(name, x, last_weight, kind):
    """Also where a map is not dense, or sizes of 1 leave its format open."""
    options = {
        "1x1": (16, 1, 1, 0),
        "stride 2": (16, 3, 2, 1),
        "depthwise": (32, 3, 1, 1, 1, 32),
        "transposed": (16, 4, 2, 1),
    }[kind]
    ours, plain = (getattr(m, f"{p}{'Transpose2d' if kind == 'transposed' else '2d'}") for m, p in PAIRS)
    layer, twin = ours(32, *options), plain(32, *options)
    if last_weight:
        layer.to(memory_format=torch.channels_last)
        twin.to(memory_format=torch.channels_last)
    with torch.no_grad():
        y = layer(x)
        twin.weight.copy_(layer.weight)
        twin.bias.copy_(layer.bias)
        wanted = twin(x)
    assert y.stride() == wanted.stride()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_an_infinite_gradient_that_meets_no_product(activation):
    """A pixel of the padding: dx and dv are finite, and what is infinite is not NaN."""
    case = Case(2, 16, 16, (4, 5), (1, 1), (1, 1), (2, 2), (1, 1))
    x, v, g, bias, residual = sample(case)
    y, norm = native.conv(x, v, g, bias, residual, *case.geometry, 0, activation, 0.1)
    dy = torch.randn_like(y)
    dy[0, 3, 0, 0] = float("inf")
    dx, _, _, _, dz = native.conv_backward(
        dy, y, x, v, g, norm, [True, False, False, True], *case.geometry, 0, activation, 0.1
    )
    assert dx.isfinite().all()
    assert not dz.isnan().any()


def test_gradients_of_another_shape_are_refused():
    case = Case(1, 16, 16, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1))
    x, v, g, bias, _ = sample(case)
    y, norm = native.conv(x, v, g, bias, None, *case.geometry, 0, "relu")
    with pytest.raises(RuntimeError, match="dy must have the dtype of x and the shape of the output"):
        native.conv_backward(y[..., :2], y, x, v, g, norm, [True] * 4, *case.geometry, 0, "relu")


def volumes_in_many_formats():
    wide = torch.randn(2, 64, 3, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    yield "dense", torch.randn(2, 32, 3, 5, 6)
    yield "channels_last_3d", wide[:, :32].contiguous(memory_format=torch.channels_last_3d)
    yield "a chunk of channels", wide[:, :32]
    yield "every other line", wide[:, :32, :, ::2]
    yield "every other level", torch.randn(2, 32, 6, 5, 6)[:, :, ::2]
    yield "levels inside rows", torch.randn(2, 32, 5, 3, 6).transpose(2, 3)
    yield "transposed", torch.randn(2, 32, 3, 6, 5).mT
    yield "a single one", wide[:1, :32]
    yield "expanded", torch.randn(1, 32, 1, 5, 6).expand(2, -1, 3, -1, -1)


@pytest.mark.parametrize(("name", "x"), list(volumes_in_many_formats()), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("kind", ["3x3x3", "1x1x1", "stride 2", "transposed"])
def test_volumes_lie_in_memory_as_they_like(name, x, kind):
    options = {"3x3x3": (16, 3, 1, 1), "1x1x1": (16, 1), "stride 2": (16, 3, 2, 1), "transposed": (16, 4, 2, 1)}[kind]
    ours, plain = (getattr(m, f"{p}{'Transpose3d' if kind == 'transposed' else '3d'}") for m, p in PAIRS)
    layer, twin = ours(32, *options), plain(32, *options)
    with torch.no_grad():
        twin.weight.copy_(layer.weight)
        twin.bias.copy_(layer.bias)
    ends = [x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    if name == "expanded":
        ends = [x.detach().requires_grad_() for _ in range(2)]
    y, wanted = layer(ends[0]), twin(ends[1])
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(y).transpose(2, 4).contiguous().transpose(2, 4)
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(ends[0].grad, ends[1].grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_a_dilation_of_0_is_refused_in_transposed_layers_too(spatial):
    op = getattr(wnfused.functional, f"conv_transpose{spatial}d")
    x, v = torch.randn(2, 3, *[5] * spatial), torch.randn(3, 4, *[3] * spatial)
    one, none = (1,) * spatial, (0,) * spatial
    with pytest.raises(ValueError, match=r"dilation: \(0,.* must be"):
        op(x, v, torch.randn(3), None, one, none, none, 1, none)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [2**31, 2**60, 2**61, 2**62, 2**63 - 1])
def test_extents_whose_sums_would_overflow(name, value, dim):
    x, v, g = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.ones(4 if dim else 8)
    with pytest.raises(ValueError, match=rf"{name}: {value} must be below 2\*\*31"):
        wnfused.functional.conv2d(x, v, g, dim=dim, **{name: value})
    if name != "stride":  # of one pixel any stride is right
        x = x[..., :1, :1]
    v = torch.randn(4, 8, 3, 3)
    with pytest.raises(ValueError, match=rf"{name}: {value} must be below 2\*\*31"):
        wnfused.functional.conv_transpose2d(x, v, torch.ones(8 if dim else 4), dim=dim, **{name: value})


@pytest.mark.parametrize("function", ["conv2d", "conv_transpose2d"])
def test_maps_without_pixels(function):
    """Padding alone is no map, for torch either; a batch of none is one."""
    call, v = getattr(wnfused.functional, function), torch.randn(4, 4, 3, 3)
    assert call(torch.randn(0, 4, 6, 0), v, torch.ones(4), padding=2 if function == "conv2d" else 0).shape[0] == 0
    with pytest.raises(ValueError, match=r"x: spatial size \[6, 0\] must be at least 1 in every dim, padding aside"):
        call(torch.randn(2, 4, 6, 0), v, torch.ones(4), padding=2 if function == "conv2d" else 0)
