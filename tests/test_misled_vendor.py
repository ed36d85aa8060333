"""What torch's own convolutions get wrong on a CPU is right here, in every backend and inside ``frozen``."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wnfused
from wnfused import _convolution
from wnfused.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

FORMATS = [torch.contiguous_format, torch.channels_last]
TOLERANCE = {torch.float32: 64 * 2.0**-24, torch.bfloat16: 4 * 2.0**-9}


# What torch itself gets wrong, by oneDNN: bfloat16 kernels with a tap that meets nothing but padding, with a dilation
# of groups and in channels_last, of a single tap with a stride, of groups whose outputs are one column; float32 ones
# padded far beyond their depth, those of one input channel whose output is one column, those that meet nothing but
# padding, and in channels_last those of a single tap with a stride; transposed ones in float32 with a stride and a
# dilation. And by torch: groups beside an image cut out of others, with weights in channels_last.
MISLEADING = {
    "outputs of a group": (
        lambda: wnfused.WNConv2d(96, 288, 5, (1, 5), 2, groups=96),
        (8, 96, 3, 3),
        torch.bfloat16,
    ),
    "a thin volume": (
        lambda: wnfused.WNConv3d(5, 80, (7, 7, 2), 1, (6, 7, 1), groups=5),
        (1, 5, 1, 14, 3),
        torch.bfloat16,
    ),
    "one voxel": (lambda: wnfused.WNConv3d(24, 24, (1, 5, 3), 1, "same", groups=24), (4, 24, 1, 1, 1), torch.bfloat16),
    "transposed from a voxel": (
        lambda: wnfused.WNConvTranspose3d(48, 16, (3, 9, 3), 3, (1, 4, 1), groups=16),
        (5, 48, 1, 1, 1),
        torch.bfloat16,
    ),
    "one pixel": (lambda: wnfused.WNConv2d(16, 32, 3, 2, 1), (2, 16, 1, 1), torch.bfloat16),
    "a column": (lambda: wnfused.WNConv2d(16, 32, 3, 2, 1), (2, 16, 8, 1), torch.bfloat16),
    "one sample": (lambda: wnfused.WNConv1d(16, 1, 5, 2, 3), (2, 16, 1), torch.bfloat16),
    "a wall": (lambda: wnfused.WNConv3d(32, 16, 3, 3, 1), (2, 32, 6, 4, 1), torch.bfloat16),
    "thin volumes": (lambda: wnfused.WNConv3d(16, 16, 3, padding=1), (2, 16, 2, 4, 4), torch.bfloat16),
    "deep padding": (lambda: wnfused.WNConv3d(2, 16, 5, 2, (4, 2, 2)), (2, 2, 8, 4, 4), torch.bfloat16),
    "transposed": (
        lambda: wnfused.WNConvTranspose3d(8, 4, 3, (1, 2, 2), (2, 1, 0), (0, 1, 1), groups=4),
        (2, 8, 4, 7, 6),
        torch.bfloat16,
    ),
    "dilated groups": (
        lambda: wnfused.WNConv2d(16, 32, 3, padding=2, dilation=2, groups=16),
        (2, 16, 33, 33),
        torch.bfloat16,
    ),
    "dilated groups of eight": (
        lambda: wnfused.WNConv2d(64, 24, 3, padding=2, dilation=2, groups=8),
        (2, 64, 33, 33),
        torch.bfloat16,
    ),
    "dilated, seventeen inputs": (
        lambda: wnfused.WNConv2d(17, 8, 3, padding=2, dilation=2),
        (3, 17, 16, 40),
        torch.bfloat16,
    ),
    "dilated, forty inputs of weights in channels_last": (
        lambda: wnfused.WNConv2d(40, 24, 5, padding=6, dilation=3).to(memory_format=torch.channels_last),
        (3, 40, 16, 40),
        torch.bfloat16,
    ),
    "transposed, dilated, seventeen outputs": (
        lambda: wnfused.WNConvTranspose2d(8, 17, 3, padding=2, dilation=2),
        (3, 8, 16, 40),
        torch.bfloat16,
    ),
    "strided pixels": (lambda: wnfused.WNConv2d(8, 2, 1, (1, 2)), (1, 8, 12, 12), torch.bfloat16),
    "one column of outputs": (
        lambda: wnfused.WNConv2d(3, 48, 2, (1, 2), groups=3),
        (2, 3, 3, 3),
        torch.bfloat16,
    ),
    "one column of a volume": (
        lambda: wnfused.WNConv3d(2, 6, (1, 1, 4), (1, 1, 2), groups=2),
        (2, 2, 1, 9, 4),
        torch.bfloat16,
    ),
    "one column of four groups": (
        lambda: wnfused.WNConv2d(16, 16, (1, 3), (1, 2), groups=4),
        (1, 16, 6, 3),
        torch.bfloat16,
    ),
    "one column of sixty-four": (
        lambda: wnfused.WNConv3d(64, 64, (3, 3, 5), (1, 1, 2), (1, 1, 0)),
        (1, 64, 5, 6, 5),
        torch.bfloat16,
    ),
    "transposed from a column": (
        lambda: wnfused.WNConvTranspose2d(16, 16, (1, 3), (1, 2), groups=4),
        (1, 16, 6, 1),
        torch.bfloat16,
    ),
    "levels behind every window": (lambda: wnfused.WNConv3d(8, 1, 2, 2), (1, 8, 9, 6, 41), torch.bfloat16),
    "levels of an output_padding": (
        lambda: wnfused.WNConvTranspose3d(8, 4, 2, 2, output_padding=1),
        (1, 8, 4, 6, 9),
        torch.bfloat16,
    ),
    "beyond the depth": (
        lambda: wnfused.WNConv3d(16, 16, 5, (3, 1, 1), (4, 2, 1), groups=4),
        (2, 16, 3, 8, 3),
        torch.float32,
    ),
    "a stem on a shallow volume": (lambda: wnfused.WNConv3d(3, 16, 7, 2, 3), (2, 3, 5, 9, 9), torch.float32),
    "a stem on a shallow volume in bfloat16": (
        lambda: wnfused.WNConv3d(1, 2, (7, 2, 5), (2, 2, 1), (3, 0, 2)),
        (2, 1, 7, 6, 11),
        torch.bfloat16,
    ),
    "one column of one channel": (lambda: wnfused.WNConv2d(1, 1, 3, (1, 2), 1), (2, 1, 9, 2), torch.float32),
    "one column of one channel, two outputs": (
        lambda: wnfused.WNConv2d(1, 2, 3, (1, 2), 1),
        (2, 1, 9, 1),
        torch.float32,
    ),
    "a kernel beside the map": (
        lambda: wnfused.WNConv2d(32, 32, (4, 1), (3, 3), (2, 1), (1, 3), groups=2),
        (1, 32, 3, 2),
        torch.float32,
    ),
    "dilated": (lambda: wnfused.WNConvTranspose1d(32, 1, 8, 3, 15, dilation=3), (2, 32, 31), torch.float32),
    "groups": (lambda: wnfused.WNConvTranspose1d(64, 64, 8, 2, 18, 1, 4, dilation=3), (2, 64, 35), torch.float32),
    "strided pixels in float32": (lambda: wnfused.WNConv2d(8, 2, 1, 2), (8, 8, 56, 56), torch.float32),
    "strided pixels of groups": (lambda: wnfused.WNConv2d(36, 6, 1, 2, groups=3), (2, 36, 30, 30), torch.float32),
    "transposed, strided pixels": (lambda: wnfused.WNConvTranspose2d(16, 8, 1, 2), (8, 16, 28, 28), torch.float32),
    "channels last": (
        lambda: wnfused.WNConvTranspose2d(17, 34, (4, 1), groups=17).to(memory_format=torch.channels_last),
        (1, 17, 3, 3),
        torch.float32,
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("name", MISLEADING)
def test_what_the_vendor_gets_wrong(name, last, backend, create_graph):
    make, shape, dtype = MISLEADING[name]
    check_where_the_vendor_is_wrong(make().to(dtype), torch.randn(shape).to(dtype), last, backend, create_graph)


@pytest.mark.parametrize("name", [name for name in MISLEADING if "teen" in name or "forty" in name])
def test_what_the_vendor_gets_wrong_by_every_instruction_set(isa, name):
    """Where the products of pairs are not had, the vendor's are asked."""
    make, shape, dtype = MISLEADING[name]
    check_where_the_vendor_is_wrong(make().to(dtype), torch.randn(shape).to(dtype), True, "native", False)


@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("name", MISLEADING)
def test_what_the_vendor_gets_wrong_inside_frozen(name, last):
    make, shape, dtype = MISLEADING[name]
    layer, x = make().to(dtype), torch.randn(shape).to(dtype)
    if last and x.dim() > 3:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    exact = copy.deepcopy(layer).double()
    wanted = exact(x.double()).detach()
    with torch.no_grad(), wnfused.frozen(layer):
        found = layer(x)
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    if dtype == torch.bfloat16:  # float32 parameters, and autocast's dtype
        layer = layer.float()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), wnfused.frozen(layer):
            found = layer(x.float())
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() <= 2 * TOLERANCE[dtype] * wanted.norm()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
def test_groups_beside_an_image_that_is_cut_out_of_others(kernel, dtype, backend):
    layer = wnfused.WNConv2d(32, 32, kernel, padding=kernel // 2, groups=2, dtype=dtype)
    layer.to(memory_format=torch.channels_last)
    x = torch.randn(4, 32, 16, 16, dtype=dtype).to(memory_format=torch.channels_last)
    with wnfused.use_backend(backend):
        whole = torch.autograd.grad(layer(x[:1]).square().sum(), list(layer.parameters()))
        for image in (x[0][None], x[0]):
            cut_out = torch.autograd.grad(layer(image).square().sum(), list(layer.parameters()))
            for one, other in zip(cut_out, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize(
    "name",
    ["dilated groups", "strided pixels", "strided pixels in float32", "one column of outputs", "beyond the depth"],
)
def test_what_the_vendor_gets_wrong_normalised_along_another_dim(name, last):
    make, shape, dtype = MISLEADING[name]
    layer = make()
    layer = type(layer)(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
        layer.groups, dim=1,
    )  # fmt: skip
    check_where_the_vendor_is_wrong(layer.to(dtype), torch.randn(shape).to(dtype), last, "native", False)


def check_where_the_vendor_is_wrong(layer, x, last, backend, create_graph):
    dtype = x.dtype
    if last and x.dim() > 3:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    exact = copy.deepcopy(layer).double()
    x64 = x.double().requires_grad_()
    x.requires_grad_()
    for _ in range(5):  # of memory that nobody wrote
        like = [x.detach(), exact(x64).detach().to(dtype)]
        litter = [torch.full_like(t, 1e30) for t in like for _ in range(20)]
        del litter
        with wnfused.use_backend(backend):
            y = layer(x)
            found = torch.autograd.grad(y.sum(), [x, *layer.parameters()], create_graph=create_graph)
        wanted = exact(x64)
        tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-4
        gradients = torch.autograd.grad(wanted.sum(), [x64, *exact.parameters()])
        for a, b in zip((y, *found), (wanted, *gradients), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("weights", FORMATS, ids=["", "weights in channels_last"])
@pytest.mark.parametrize("maps", FORMATS, ids=["", "channels_last"])
@pytest.mark.parametrize("inputs", [2, 3, 15])
def test_strided_pixels_of_a_first_layer(inputs, maps, weights):
    """Nobody asks for the gradient by images. The vendor would write beyond the memory of the other, and end the
    process; ``Module.to(memory_format=...)`` gives 1x1 weights strides that it takes for channels_last."""
    layer = wnfused.WNConv2d(inputs, 48, 1, 2).to(memory_format=weights)
    x = torch.randn(2, inputs, 128, 128).to(memory_format=maps)
    exact = copy.deepcopy(layer).double()
    dy = torch.randn(2, 48, 64, 64)
    wanted = torch.autograd.grad(exact(x.double()), exact.parameters(), dy.double())
    for backend in ("native", "reference"):
        for create_graph in (False, True):
            with wnfused.use_backend(backend):
                found = torch.autograd.grad(layer(x), layer.parameters(), dy, create_graph=create_graph)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:1].expand_as(t),
        lambda t: t[:, :1].expand_as(t),
        lambda t: torch.cat([t, t], 3)[..., ::2],
        lambda t: torch.cat([t, t], 1).contiguous(memory_format=torch.channels_last)[:, 1:7],
    ],
    ids=["one image", "one channel", "every other column", "some channels"],
)
@pytest.mark.parametrize(
    "layer", [wnfused.WNConv2d(6, 9, 1, 2, groups=3), wnfused.WNConvTranspose2d(6, 9, 1, (2, 1), groups=3)]
)
def test_strided_pixels_of_views(layer, view):
    """The gradient has a memory of its own, whatever the input's."""
    layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    layer.activation = "relu"
    x = view(torch.randn(2, 6, 7, 5)).requires_grad_()
    exact = copy.deepcopy(layer).double()
    y, wanted = layer(x), exact(x.double())
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(found, torch.autograd.grad(wanted, [x, *exact.parameters()], dy.double()), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("weights", FORMATS, ids=["", "weights in channels_last"])
@pytest.mark.parametrize("maps", FORMATS, ids=["", "channels_last"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 8, 1), (2, 1, 8, 8), (1, 3, 8, 8)], ids=str)
def test_torchs_format_is_told_as_torch_tells_it(shape, kernel, maps, weights):
    """By the format of what it gives."""
    x = torch.randn(shape).to(memory_format=maps, copy=True)
    w = torch.randn(5, shape[1], kernel, kernel).to(memory_format=weights, copy=True)
    y = torch.nn.functional.conv2d(x, w, padding=kernel)
    last = _convolution._suggests_channels_last(x) or _convolution._suggests_channels_last(w)
    assert last == y.is_contiguous(memory_format=torch.channels_last)


@given(st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_both_sides_know_the_same_faults(data):
    """``vendor_product.cpp`` of its own calls, ``wnfused._convolution`` of torch's functions."""
    transposed = data.draw(st.booleans())
    dims, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    inputs, outputs = data.draw(st.sampled_from([1, 3, 8, 16, 17, 32])), data.draw(st.sampled_from([1, 2, 16]))

    def extents(least, most):
        return data.draw(st.lists(st.integers(least, most), min_size=dims, max_size=dims))

    kernel, stride, padding, dilation = extents(1, 5), extents(1, 4), extents(0, 5), extents(1, 3)
    extra = [min(n, s - 1) for n, s in zip(extents(0, 2), stride, strict=True)] if transposed else [0] * dims
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if transposed:  # of y at least a pixel
        beyond = zip(reach, padding, extra, stride, strict=True)
        least = [max(1, 1 - (r - 2 * p + e - 1) // s) for r, p, e, s in beyond]
    else:
        least = [max(1, r - 2 * p) for r, p in zip(reach, padding, strict=True)]
    size = [n + data.draw(st.integers(0, 4)) for n in least]
    x = torch.empty(data.draw(st.integers(1, 2)), inputs * groups, *size, dtype=dtype)
    channels = (inputs * groups, outputs) if transposed else (outputs * groups, inputs)
    w = torch.empty(*channels, *kernel, dtype=dtype)
    if dims == 2:  # by strides, which a 1x1 weight has of its own, too
        x, w = (t.to(memory_format=data.draw(st.sampled_from(FORMATS)), copy=True) for t in (x, w))
    sliding = (stride, padding, dilation)
    found = torch.ops.wnfused_native.cpu_vendor_misleads(x, w, *sliding, transposed, extra, groups)
    half = dtype == torch.bfloat16

    def unwritten(backward):
        return _convolution._is_unwritten(x, w, *sliding, transposed, extra, half, backward)

    def besides(weight):
        return _convolution._backward_is_wrong(x, w, stride, dilation, transposed, groups, half, weight)

    if dtype == torch.float64:
        assert not any(found)
        return
    forward = unwritten(False) or (transposed and besides(False))
    assert tuple(found) == (forward, besides(True) or unwritten(True))
