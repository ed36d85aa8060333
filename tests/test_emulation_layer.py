"""The CUDA kernels beside the vendor's product of a layer, emulated: its weight, both ways, its end and its mask."""

import pytest
import torch
from emulator import Guarded, emulation, tensor_of

from wnfused import reference

# Rows, channels and taps: a warp's and a block's rows, lengths that no number of threads divides.
SHAPES = [(5, 7, 1), (3, 4, 9), (6, 30, 9), (2, 2000, 1), (4, 1, 9), (3, 257, 1)]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


@pytest.fixture(scope="module")
def module():
    return emulation()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("turned", [None, "channels last", "channels first"], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weight_and_gradient(module, shape, dtypes, turned, reverse):
    """``turned``: how the weight's rows lie, where the rows of v lie the other way."""
    wide, narrow = dtypes
    rows, channels, taps = shape
    fastest = {None: channels * taps, "channels last": channels, "channels first": taps}[turned]
    v, g, bias = torch.randn(shape).to(wide), (torch.rand(rows) + 0.5).to(wide), torch.randn(rows)
    v[1].zero_()
    dw = torch.randn(shape).to(narrow)

    def in_memory(t, last):
        """Rows of [channels, taps], as [taps, channels] where ``last``."""
        return (t.transpose(1, 2) if last else t).reshape(rows, -1).contiguous()

    v_last, w_last = (turned == "channels first"), (turned == "channels last")
    guarded = Guarded()
    v_array, g_array, dw_array = (
        guarded.array(t) for t in (in_memory(v, v_last), g, in_memory(dw, w_last))
    )  # fmt: skip
    bias_array = guarded.array(bias)
    w, bias_out, norm = guarded.output(dw.reshape(rows, -1)), guarded.output(bias.to(narrow)), guarded.output(bias)
    faults = module.layer_weight(v_array, g_array, None, bias_array, w, norm, bias_out, fastest, None, None, reverse)
    dv, dg, dbias = guarded.output(v.reshape(rows, -1)), guarded.output(g), guarded.output(g)
    partial = torch.randn(45, rows)
    sums = (guarded.array(partial), dbias)
    faults += module.layer_weight(v_array, g_array, dw_array, None, dv, norm, dg, fastest, *sums, reverse)
    assert faults + guarded.faults() == []

    w_true, norm_true = reference.weight_norm(v.double(), g.double(), 0)
    dv_true, dg_true = reference.weight_norm_backward(dw.double(), v.double(), g.double(), norm_true, 0)
    expected = (
        (w, in_memory(w_true, w_last), narrow), (norm, norm_true.reshape(-1), torch.float32),
        (bias_out, bias.double(), narrow), (dv, in_memory(dv_true, v_last), wide), (dg, dg_true.reshape(-1), wide),
        (dbias, partial.double().sum(0), wide),
    )  # fmt: skip
    for array, value, dtype in expected:
        tolerance = 2 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
        scale = max(value.abs().max().item(), 1)
        torch.testing.assert_close(
            tensor_of(array).double().reshape(value.shape), value, rtol=tolerance, atol=tolerance * scale
        )


def test_the_bits_are_the_same_whichever_warp_goes_first(module):
    v, g = torch.randn(3, 2000), torch.rand(3)
    results = []
    for reverse in (False, True):
        guarded = Guarded()
        w, norm, bias = guarded.output(v), guarded.output(g), guarded.output(g)
        arguments = (guarded.array(v), guarded.array(g), None, None, w, norm, bias, 2000, None, None, reverse)
        assert module.layer_weight(*arguments) + guarded.faults() == []
        results.append((tensor_of(w), tensor_of(norm)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Entries in memory, channels, entries from one channel to the next: vectors of 16 bytes and single entries, rows of
# channels and planes, more than a block of threads.
MAPS = [(2 * 16, 16, 1), (3 * 24 * 35, 24, 35), (2 * 5 * 16, 5, 16), (7 * 6, 6, 1), (3 * 1100, 1100, 1), (9, 3, 1)]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(("activates", "slope"), [(False, 0.0), (True, 0.0), (True, 0.1)])
@pytest.mark.parametrize("given", ["bias", "residual", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "channels", "inner"), MAPS)
def test_epilogue(module, count, channels, inner, dtype, given, activates, slope, reverse):
    y, bias, residual = torch.randn(count).to(dtype), torch.randn(channels).to(dtype), torch.randn(count).to(dtype)
    y[0], y[1] = torch.nan, -torch.inf
    true = y.double()
    if given != "residual":
        true = true + bias.double().repeat_interleave(inner).repeat(count // (channels * inner))
    if given != "bias":
        true = true + residual.double()
    if activates:
        true = torch.where(true <= 0, true * slope, true)
    guarded = Guarded()
    array = guarded.array(y)
    arguments = (
        None if given == "residual" else guarded.array(bias), None if given == "bias" else guarded.array(residual),
        channels, inner, activates, slope, reverse,
    )  # fmt: skip
    faults = module.layer_epilogue(array, *arguments)
    assert faults == []
    found = tensor_of(array).double()
    assert found[0].isnan()
    assert found[1] == (0 if activates and slope == 0 else -torch.inf)
    torch.testing.assert_close(found[2:], true[2:], rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("shares", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("map", [*MAPS, (5 * 2304, 2304, 1), (700 * 16, 16, 1)], ids=str)
def test_mask_and_sums(module, map, dtype, shares, reverse):
    number = MAPS.index(map) if map in MAPS else sum(map)
    slope = (None, 0.0, 0.1)[(number + (shares or 0) + (dtype == torch.bfloat16) + reverse) % 3]
    count, channels, inner = map
    check_mask(module, count, channels, inner, dtype, slope, shares, reverse)


def check_mask(module, count, channels, inner, dtype, slope, shares, reverse):
    """``slope``: 0 for a ReLU, None for no activation; ``shares``: of the sums, None where none are asked for."""
    dy, y = torch.randn(count).to(dtype), torch.randn(count).to(dtype)
    y[2] = 0
    true = dy.double()
    if slope is not None:
        true = torch.where(y > 0, true, slope * true)
    guarded = Guarded()
    dz = None if slope is None else guarded.output(dy)
    partial = None if shares is None else guarded.output(torch.empty(shares, channels))
    faults = module.layer_mask(
        guarded.array(dy), None if slope is None else guarded.array(y), dz, partial, channels, inner, slope or 0.0,
        reverse,
    )  # fmt: skip
    assert faults + guarded.faults() == []
    if dz is not None:
        torch.testing.assert_close(tensor_of(dz).double(), true, rtol=torch.finfo(dtype).eps, atol=0)
        true = tensor_of(dz).double()  # sums are of what was stored
    if partial is not None:
        eps = torch.finfo(torch.float32).eps
        sums = true.reshape(-1, channels, inner).sum((0, 2))
        torch.testing.assert_close(
            tensor_of(partial).double().sum(0), sums, rtol=eps, atol=8 * eps * (count / channels) ** 0.5
        )


def test_masks_of_what_is_not_finite_are_torchs(module):
    """A NaN passes a ReLU's mask, not a leaky one's; infinite gradients are not multiplied by a ReLU's 0."""
    y = torch.tensor([torch.nan, torch.nan, 1.0, -1.0, torch.inf, -torch.inf, 0.0, -0.0])
    dy = torch.tensor([2.0, torch.inf, torch.inf, torch.inf, torch.nan, torch.nan, -torch.inf, 3.0])
    for slope in (0.0, 0.1):
        guarded = Guarded()
        dz = guarded.output(dy)
        assert module.layer_mask(guarded.array(dy), guarded.array(y), dz, None, 8, 1, slope, False) == []
        leaky = torch.ops.aten.leaky_relu_backward(dy, y, slope, True)
        true = leaky if slope else torch.ops.aten.threshold_backward(dy, y, 0)
        torch.testing.assert_close(tensor_of(dz), true, equal_nan=True)


def test_the_bits_of_sums_are_the_same_whichever_warp_goes_first(module):
    dy = torch.randn(64 * 1024)
    results = []
    for reverse in (False, True):
        guarded = Guarded()
        partial = guarded.output(torch.empty(7, 16))
        assert module.layer_mask(guarded.array(dy), None, None, partial, 16, 1, 0.0, reverse) == []
        results.append(tensor_of(partial))
    assert torch.equal(*results)
