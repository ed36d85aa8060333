"""The single layers that CUDA tensors take in C++ (``csrc/autograd/vendor.cpp``), on the CPU against the reference.

What they call beside torch's own ops, the kernels that scale the weight and those of linear layers with few samples,
are the reference's formulas here; the kernels themselves are tested by their emulation.
"""

import itertools

import pytest
import torch

from wnfused import reference
from wnfused.backends import native, native_autograd
from wnfused.backends.library import opened
from wnfused.backends.triton import strategy

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None or opened("autograd") is not None, reason="the C++ autograd library is not there"
)

INPUT, WEIGHT, BIAS, RESIDUAL = 1, 2, 4, 8
ops = torch.ops.wnfused_autograd


def assert_dense_rows(v):
    """As ``csrc/layout.h`` asks for them: torch's own words leave out dims of size 1."""
    last = v.dim() in FORMATS and v.is_contiguous(memory_format=FORMATS[v.dim()]) and v.stride(1) == 1
    assert v.is_contiguous() or (last and v.stride(0) == v[0].numel())


@pytest.fixture(autouse=True)
def called():
    """The kernels, as formulas that look at nothing but shapes. Gives the names of those that were called."""
    names = []

    def layer_weight_(v, g, bias, w, norm, bias_out):
        names.append("layer_weight")
        assert_dense_rows(v)
        made, norms = reference.weight_norm(v.double(), g.double(), 0)
        w.copy_(made)
        if norm is not None:
            norm.copy_(norms.reshape(-1))
        if bias is not None:
            assert bias.dtype == torch.float32
            bias_out.copy_(bias)

    def layer_weight_backward_(dw, v, g, norm, dv, dg, partial=None, dbias=None):
        assert (partial is None) == (dbias is None)
        assert_dense_rows(v)
        assert_dense_rows(dw)
        if dbias is not None:
            dbias.copy_(partial.sum(0))
        shape = [-1] + [1] * (v.dim() - 1)
        found = reference.weight_norm_backward(dw.double(), v.double(), g.double(), norm.double().reshape(shape), 0)
        dv.copy_(found[0])
        dg.copy_(found[1].reshape(dg.shape))

    def layer_epilogue_(y, bias, residual, channel, activation, slope):
        shape = [1] * y.dim()
        shape[channel] = -1
        z = y.float() + (0 if bias is None else bias.float().reshape(shape))
        z = z + (0 if residual is None else residual.float())
        assert bias is None or bias.dtype == y.dtype
        assert residual is None or residual.stride() == y.stride()
        y.copy_([lambda z: z, torch.relu, lambda z: torch.nn.functional.leaky_relu(z, slope)][activation](z))

    def layer_mask_(dy, y, dz, channel, slope, sums):
        names.append("layer_mask")
        assert all(t is None or t.stride() == dy.stride() for t in (y, dz))
        last = channel == 1 and dy.dim() in FORMATS and dy.is_contiguous(memory_format=FORMATS[dy.dim()])
        assert dy.is_contiguous() or (last and dy.stride(0) == dy[0].numel())
        made = dy.float()
        if y is not None:
            made = torch.where(y <= 0, 0.0, made) if slope == 0 else torch.where(y > 0, made, slope * made)
            dz.copy_(made)
        partial = made.movedim(channel, -1).reshape(-1, made.shape[channel])
        return torch.stack([partial[::2].sum(0), partial[1::2].sum(0)]) if sums else partial[:0].clone()

    def small_linear_(x, v, g, bias, residual, y, norm, activates, slope, tf32):
        names.append("small_linear")
        assert_readable(x, v, g, bias, residual)
        made, norms = reference.linear(
            *(None if t is None else t.double() for t in (x, v, g, bias, residual)), 0,
            "leaky_relu" if activates else "none", slope,
        )  # fmt: skip
        y.copy_(made)
        norm.copy_(norms.reshape(-1))

    def small_linear_backward_(dy, y, x, v, g, norm, dx, dv, dg, dbias, activates, slope, tf32):
        names.append("small_linear_backward")
        assert_readable(dy, y, x, v, g, norm, dx, dv, dg, dbias)
        dz = torch.where(y > 0, 1.0, slope) * dy.double() if activates else dy.double()
        if dx is not None:
            dx.copy_(dz @ reference.weight_norm(v.double(), g.double(), 0)[0])
        if dv is not None:
            layer_weight_backward_(dz.T @ x.double(), v, g, norm, dv, dg)
        if dbias is not None:
            assert dv is not None
            dbias.copy_(dz.sum(0))

    library = torch.library.Library("wnfused_native", "IMPL")
    library.impl("layer_mask_", layer_mask_, "CPU")
    library.impl("small_linear_", small_linear_, "CPU")
    library.impl("small_linear_backward_", small_linear_backward_, "CPU")
    library.impl("layer_epilogue_", layer_epilogue_, "CPU")
    library.impl("layer_weight_", layer_weight_, "CPU")
    library.impl("layer_weight_backward_", layer_weight_backward_, "CPU")
    yield names
    library._destroy()


def assert_readable(*tensors):
    assert all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in tensors)


def relative(found, true):
    return ((found.double() - true).norm() / true.norm().clamp_min(1e-30)).item()


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def laid_out(t, last):
    return t.contiguous(memory_format=FORMATS[t.dim()]) if last and t.dim() in FORMATS else t


LINEAR = {
    "rows": (7, 24),
    "a sequence": (2, 3, 24),
    "one sample": (24,),
    "many": (300, 24),
    "many sequences": (2, 150, 24),
}
# Shape of x and v, stride, padding, dilation, groups.
CONVS = {
    "3x3": ((2, 8, 9, 7), (16, 8, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1": ((2, 8, 5, 5), (16, 8, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "groups": ((2, 8, 9, 7), (16, 2, 3, 3), (2, 1), (1, 0), (1, 2), 4),
    "one dim": ((2, 8, 9), (16, 8, 3), (1,), (1,), (1,), 1),
    "three dims": ((2, 4, 5, 6, 7), (8, 4, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
}
ACTIVATIONS = ((0, 0.01), (1, 0.01), (2, 0.1), (2, 0.0))


def check(run, backward, true, x, v, g, bias, residual, constants, dtype, needs):
    """Against autograd through the reference in float64, from the tensors as they were rounded."""
    y, norm = run(x, v, g, bias, residual, *constants)
    tensors = [None if t is None else t.double().requires_grad_() for t in (x, v, g, bias, residual)]
    expected = true(*tensors)
    # In bfloat16 a unit may be on the other side of its kink.
    tolerance, of_gradients = (4e-6, 2e-5) if dtype == torch.float32 else (2e-2, 0.25)
    assert y.dtype == dtype
    assert norm.dtype == torch.float32
    assert relative(y, expected) < tolerance
    torch.testing.assert_close(norm.double(), v.double().flatten(1).norm(dim=1), rtol=1e-5, atol=0)
    dy = torch.randn(y.shape).to(dtype)
    found = backward(dy, y, x, v, g, norm, needs, *constants)
    if constants[-2] == 0:  # the gradient by a residual is dy itself
        assert found[4] is None
        found = (*found[:4], dy if needs & RESIDUAL else None)
    wanted = [needs & INPUT, needs & WEIGHT, needs & WEIGHT, needs & BIAS, needs & RESIDUAL]
    gradients = torch.autograd.grad(expected, [t for t in tensors if t is not None], dy.double(), allow_unused=True)
    by_input = iter(gradients)
    for given, gradient, want in zip(tensors, found, wanted, strict=True):
        expected_gradient = None if given is None else next(by_input)
        if not want:
            assert gradient is None
        elif given is not None:
            assert relative(gradient, expected_gradient) < of_gradients
    return y, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize(("code", "slope"), ACTIVATIONS)
@pytest.mark.parametrize("name", list(LINEAR))
def test_linear(called, name, code, slope, residual, dtype):
    x, v, g = torch.randn(LINEAR[name]).to(dtype), torch.randn(40, 24), torch.rand(40, 1) + 0.5
    r = torch.randn(*LINEAR[name][:-1], 40).to(dtype) if residual else None

    def true(x, v, g, bias, residual):
        return reference.linear(x, v, g, bias, residual, 0, reference.ACTIVATIONS[code], slope)[0]

    y, found = check(
        ops.vendor_linear, ops.vendor_linear_backward, true, x, v, g, torch.randn(40), r, (code, slope), dtype,
        INPUT + WEIGHT + BIAS + RESIDUAL * residual,
    )  # fmt: skip
    assert y.shape == (*LINEAR[name][:-1], 40)
    assert called[0] == ("layer_weight" if name.startswith("many") else "small_linear")
    assert found[1].dtype == found[2].dtype == torch.float32
    assert found[2].shape == g.shape


@pytest.mark.parametrize("samples", [7, 300])
@pytest.mark.parametrize("needs", range(16))
def test_only_what_is_wanted_is_given(needs, samples):
    x, v, g, r = torch.randn(samples, 24), torch.randn(40, 24), torch.rand(40), torch.randn(samples, 40)

    def true(x, v, g, bias, residual):
        return reference.linear(x, v, g, bias, residual, 0, "relu", 0.0)[0]

    check(
        ops.vendor_linear, ops.vendor_linear_backward, true, x, v, g, torch.randn(40), r, (1, 0.0), torch.float32, needs
    )


# Samples, rows, columns and dtypes of x and v, and whether the kernels for few samples take such a layer.
SMALL = [
    ((256, 40, 24), torch.float32, torch.float32, True), ((257, 40, 24), torch.float32, torch.float32, False),
    ((2, 42, 24), torch.float32, torch.float32, False), ((2, 40, 20), torch.float32, torch.float32, False),
    ((1, 8, 4096), torch.float32, torch.float32, True), ((1, 8, 4104), torch.float32, torch.float32, False),
    ((256, 256, 1024), torch.float32, torch.float32, True), ((256, 512, 1024), torch.float32, torch.float32, False),
    ((256, 512, 1024), torch.bfloat16, torch.float32, True), ((7, 40, 24), torch.bfloat16, torch.bfloat16, True),
    ((32, 2048, 2048), torch.bfloat16, torch.float32, True), ((1, 4100, 24), torch.float32, torch.float32, False),
    ((128, 8, 4096), torch.float32, torch.float32, False), ((7, 40, 24), torch.float16, torch.float32, False),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "narrow", "wide", "small"), SMALL, ids=str)
def test_few_samples_have_kernels_of_their_own(called, shape, narrow, wide, small):
    samples, rows, columns = shape
    x, v, g = torch.randn(samples, columns).to(narrow), torch.randn(rows, columns).to(wide), torch.ones(rows).to(wide)
    y, norm = ops.vendor_linear(x, v, g, None, None, 1, 0.0)
    ops.vendor_linear_backward(torch.ones_like(y), y, x, v, g, norm, WEIGHT, 1, 0.0)
    assert ("small_linear_backward" in called) == ("small_linear" in called) == small


def test_few_samples_can_be_the_vendors(called):
    x, v, g = torch.randn(7, 24), torch.randn(40, 24), torch.ones(40)
    assert native_autograd.use_small_linear(False) is True
    try:
        y, norm = ops.vendor_linear(x, v, g, None, None, 0, 0.0)
        ops.vendor_linear_backward(torch.ones_like(y), y, x, v, g, norm, WEIGHT, 0, 0.0)
    finally:
        assert native_autograd.use_small_linear(True) is False
    assert called == ["layer_weight"]
    with strategy.forced("vendor"):
        ops.vendor_linear(x, v, g, None, None, 0, 0.0)
    ops.vendor_linear(x, v, g, None, None, 0, 0.0)
    assert called == ["layer_weight", "layer_weight", "small_linear"]


@pytest.mark.parametrize("samples", [2, 60], ids=["few", "many"])
@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("dims", [4, 5])
def test_gradients_of_maps_in_channels_last(called, dims, code, samples):
    """As a convolution behind a linear layer gives them, whose features are the last dim all the same."""
    shape = (samples, 3, *[2] * (dims - 4), 2, 24)
    x, v, g, b = torch.randn(shape), torch.randn(40, 24), torch.rand(40), torch.randn(40)
    y, norm = ops.vendor_linear(x, v, g, b, None, code, 0.0)
    dy = torch.randn(y.shape).contiguous(memory_format=FORMATS[dims])
    needs = INPUT + WEIGHT + BIAS + RESIDUAL
    found = ops.vendor_linear_backward(dy, y, x, v, g, norm, needs, code, 0.0)
    expected = ops.vendor_linear_backward(dy.contiguous(), y, x, v, g, norm, needs, code, 0.0)
    assert ("layer_weight" in called) == (samples == 60)
    torch.testing.assert_close(found, expected)


def test_strides_of_a_single_image_say_nothing():
    """torch takes [1, C, H, W] for channels_last whatever the stride between images is."""
    x, v, g, b = torch.randn(1, 8, 5, 5), torch.randn(16, 8, 3, 3), torch.rand(16), torch.randn(16)
    constants = ([1, 1], [1, 1], [1, 1], 1, 0, 0.0)
    y, norm = ops.vendor_conv(x, v, g, b, None, *constants)
    dy = torch.randn(2, *y.shape[1:]).contiguous(memory_format=torch.channels_last)[::2]
    found = ops.vendor_conv_backward(dy, y, x, v, g, norm, INPUT + WEIGHT + BIAS, *constants)
    expected = ops.vendor_conv_backward(dy.contiguous(), y, x, v, g, norm, INPUT + WEIGHT + BIAS, *constants)
    torch.testing.assert_close(found[:4], expected[:4])


def test_strides_of_a_single_row_say_nothing():
    bank = torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    x, v, g = torch.randn(2, 8, 5, 5), bank[::2][:1], torch.rand(1)
    constants = ([1, 1], [1, 1], [1, 1], 1, 0, 0.0)
    y, norm = ops.vendor_conv(x, v, g, None, None, *constants)
    expected, norms = ops.vendor_conv(x, v.clone(), g, None, None, *constants)
    torch.testing.assert_close((y, norm), (expected, norms))
    found = ops.vendor_conv_backward(y, y, x, v, g, norm, INPUT + WEIGHT, *constants)
    wanted = ops.vendor_conv_backward(y, y, x, v.clone(), g, norm, INPUT + WEIGHT, *constants)
    torch.testing.assert_close(found[:3], wanted[:3])


@pytest.mark.parametrize("activation", [0, 1])
def test_the_gradient_of_a_bias_alone_asks_for_no_weight_s(called, activation):
    x, v, g, b = torch.randn(7, 24), torch.randn(40, 24), torch.rand(40), torch.randn(40)
    y, norm = ops.vendor_linear(x, v, g, b, None, activation, 0.0)
    dy = torch.randn_like(y)
    expected = ops.vendor_linear_backward(dy, y, x, v, g, norm, INPUT + WEIGHT + BIAS, activation, 0.0)
    called.clear()
    found = ops.vendor_linear_backward(dy, y, x, v, g, norm, BIAS, activation, 0.0)
    assert called == ["layer_mask"]
    assert found[1] is None
    torch.testing.assert_close(found[3], expected[3])
    found = ops.vendor_linear_backward(dy, y, x, v, g, norm, INPUT + BIAS, activation, 0.0)
    torch.testing.assert_close((found[0], found[3]), (expected[0], expected[3]))


def test_the_choice_names_why_there_is_none(monkeypatch):
    monkeypatch.setattr(native_autograd, "unavailable", lambda: "it was built for another torch")
    with pytest.raises(RuntimeError, match="use_small_linear: it was built for another torch"):
        native_autograd.use_small_linear(True)
    with strategy.forced("vendor"):  # there is nothing to be left out
        pass


def test_what_does_not_lie_as_the_kernels_read_is_copied(called):
    """Off by one entry, transposed, expanded."""
    x = torch.randn(7 * 24 + 1)[1:].reshape(7, 24)
    v, g = torch.randn(24, 40).T, torch.rand(40 + 1)[1:]
    y, norm = ops.vendor_linear(x, v, g, None, None, 0, 0.0)
    torch.testing.assert_close(y, reference.linear(x, v, g, None, None, 0, "none", 0.0)[0])
    dy = torch.ones(1, 1).expand(7, 40)
    found = ops.vendor_linear_backward(dy, y, x, v, g, norm, INPUT + WEIGHT + BIAS, 0, 0.0)
    torch.testing.assert_close(found[0], dy @ reference.weight_norm(v, g, 0)[0])
    dv, dg = reference.weight_norm_backward(dy.T @ x, v, g, norm.reshape(-1, 1), 0)
    torch.testing.assert_close(found[1], dv)
    torch.testing.assert_close(found[2], dg.reshape(-1))
    assert called == ["small_linear", "small_linear_backward"]


@pytest.mark.parametrize("residual", [None, False, True], ids=["", "residual", "residual in channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize(("code", "slope"), ACTIVATIONS)
@pytest.mark.parametrize("name", list(CONVS))
def test_conv(name, code, slope, last, dtype, residual):
    """``last``: whether x, and whether v, is in channels_last; y is where either is."""
    shape, weight, *geometry = CONVS[name]
    x, v = laid_out(torch.randn(shape).to(dtype), last[0]), laid_out(torch.randn(weight), last[1])
    g, bias = torch.rand(weight[0], *[1] * (len(weight) - 1)) + 0.5, torch.randn(weight[0])

    def true(x, v, g, bias, residual):
        stride, padding, dilation, groups = geometry
        rest = (stride, padding, dilation, False, [0] * len(stride), groups, 0, reference.ACTIVATIONS[code], slope)
        return reference.conv(x, v, g, bias, residual, *rest)[0]

    added = None
    if residual is not None:
        added = laid_out(torch.randn(true(x.float(), v, g, bias, None).shape).to(dtype), residual)
    y, found = check(
        ops.vendor_conv, ops.vendor_conv_backward, true, x, v, g, bias, added, (*geometry, code, slope), dtype,
        INPUT + WEIGHT + BIAS + RESIDUAL * (residual is not None),
    )  # fmt: skip
    formats = {reference.suggest_memory_format(t) for t in (x, v)} - {torch.contiguous_format}
    assert y.is_contiguous(memory_format=formats.pop() if formats else torch.contiguous_format)
    assert found[1].stride() == v.stride()


def test_dtypes_of_the_bias_and_half_precision_parameters():
    """A float32 bias is rounded beside the weight; parameters in the dtype of x are taken as they are."""
    x, v, g = torch.randn(7, 24).bfloat16(), torch.randn(40, 24).bfloat16(), torch.ones(40).bfloat16()
    for bias in (None, torch.randn(40), torch.randn(40).bfloat16()):
        y, norm = ops.vendor_linear(x, v, g, bias, None, 0, 0.0)
        expected = reference.linear(x.double(), v.double(), g.double(), None if bias is None else bias.double())[0]
        assert y.dtype == torch.bfloat16
        assert relative(y, expected) < 2e-2
        dv, dg = ops.vendor_linear_backward(y, y, x, v, g, norm, WEIGHT, 0, 0.0)[1:3]
        assert dv.dtype == dg.dtype == torch.bfloat16


def test_a_nan_stays_and_a_leaky_slope_of_0_is_a_relu():
    x, v, g = torch.full((1, 1), torch.nan), torch.ones(1, 1), torch.ones(1)
    for code in (1, 2):
        y, norm = ops.vendor_linear(x, v, g, None, None, code, 0.0)
        assert y.isnan().all()
        infinite = torch.full((1, 1), torch.inf)
        zero = torch.zeros(1, 1)
        assert ops.vendor_linear_backward(infinite, zero, zero, v, g, norm, INPUT, code, 0.0)[0].item() == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g": torch.ones(39)}, "one entry a row"),
        ({"g": torch.ones(5, 8)}, "one entry a row"),
        ({"bias": torch.ones(39)}, "bias"),
        ({"bias": torch.ones(40).double()}, "bias"),
        ({"residual": torch.ones(1, 40)}, "residual"),
        ({"residual": torch.ones(7, 40).double()}, "residual"),
        ({"x": torch.ones(7, 23)}, "columns of v"),
        ({"code": 3}, "activation"),
        ({"code": 2, "slope": -0.1}, "negative_slope"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    given = {"x": torch.ones(7, 24), "v": torch.ones(40, 24), "g": torch.ones(40), "bias": None, "residual": None}
    given |= {"code": 1, "slope": 0.0} | change
    with pytest.raises(RuntimeError, match=words):
        ops.vendor_linear(*given.values())


@pytest.mark.parametrize("before", [False, True])
def test_cudnn_is_told_what_it_was_told_before(before):
    """Within a call it is asked for deterministic algorithms; the flag is torch's for all."""
    x, v, g, geometry = torch.randn(2, 8, 9, 7), torch.randn(16, 8, 3, 3), torch.ones(16), ((1, 1), (1, 1), (1, 1), 1)
    torch._C._set_cudnn_deterministic(before)
    try:
        y, norm = ops.vendor_conv(x, v, g, None, None, *geometry, 0, 0.0)
        ops.vendor_conv_backward(y, y, x, v, g, norm, 3, *geometry, 0, 0.0)
        assert torch._C._get_cudnn_deterministic() == before
    finally:
        torch._C._set_cudnn_deterministic(False)


def test_the_node_of_a_cpu_layer_is_not_the_vendors():
    """The library's ops for CUDA tensors do not stand in the way of those for CPU tensors."""
    assert native_autograd.unavailable() is None
    y, _ = torch.ops.wnfused_native.linear(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1), None, None, 0, 0.0)
    assert y.shape == (1, 1)
