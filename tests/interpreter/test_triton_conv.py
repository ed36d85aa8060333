"""The convolution's kernels: geometry, ragged tiles, splits, layouts, zero filters; and the residual stage."""

import pytest
import torch
from triton_cases import DEVICE, DTYPES, NAMES, SMALL, TOLERANCE, bias, both, check, relative

import wnfused
from wnfused import reference
from wnfused.backends import triton as backend
from wnfused.backends.triton import configurations, strategy

# (N, C, (H, W), F, kernel, stride, padding, dilation)
GEOMETRIES = [
    (2, 3, (6, 5), 4, (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 17, (5, 5), 18, (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 16, (6, 6), 32, (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 16, (6, 5), 8, (1, 1), (1, 1), (0, 0), (1, 1)),
    (2, 5, (7, 6), 6, (1, 1), (2, 2), (0, 0), (1, 1)),
    (2, 4, (9, 8), 5, (3, 3), (2, 1), (2, 0), (1, 2)),
    (1, 2, (9, 7), 3, (5, 2), (3, 2), (4, 1), (1, 3)),
    (2, 1, (4, 4), 1, (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 2, (2, 2), 3, (3, 3), (1, 1), (2, 2), (1, 1)),
    (0, 3, (5, 5), 4, (3, 3), (1, 1), (1, 1), (1, 1)),
]


@pytest.fixture(autouse=True)
def fused():
    with strategy.forced("fused"):
        yield


def sample(n, c, size, f, kernel, stride, padding, dilation, dtype=torch.float32, parameters=torch.float32):
    x = torch.randn(n, c, *size, device=DEVICE).to(dtype)
    v = torch.randn(f, c, *kernel, device=DEVICE).to(parameters)
    g, b = torch.randn(f, 1, 1, 1, device=DEVICE).to(parameters), torch.randn(f, device=DEVICE).to(parameters)
    geometry = (list(stride), list(padding), list(dilation), False, [0, 0], 1)
    y = torch.convolution(x.float(), v.float(), None, *geometry)
    return [x, v, g, b, torch.randn(y.shape, device=DEVICE).to(dtype)], geometry


def last(tensors):
    format = torch.channels_last
    return [t.contiguous(memory_format=format) if t is not None and t.dim() == 4 else t for t in tensors]


@pytest.mark.parametrize("tile", [SMALL, None], ids=["small tiles", "the table's"])
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
def test_geometries(case, activation, tile):
    with configurations.forced(tile):
        check(*both("conv", *sample(*case), activation=activation), torch.float32)


@pytest.mark.parametrize("case", GEOMETRIES[:3], ids=str)
def test_channels_last(case):
    tensors, geometry = sample(*case)
    found, expected = both("conv", last(tensors), geometry, activation="leaky_relu")
    check(found, expected, torch.float32)
    assert found["y"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("parameters", ["the operands'", "float32"])
def test_half_precision_with_either_type_of_parameters(dtype, parameters):
    tensors, geometry = sample(*GEOMETRIES[2], dtype, torch.float32 if parameters == "float32" else dtype)
    found, expected = both("conv", tensors, geometry, activation="relu")
    assert found["y"].dtype == found["dx"].dtype == dtype
    assert found["dv"].dtype == tensors[1].dtype
    check(found, expected, dtype)


def test_tf32_has_no_bias():
    """As for the linear layer."""
    torch.backends.cudnn.allow_tf32 = True
    (x, v, g, _, r), geometry = sample(2, 16, (8, 8), 24, (3, 3), (1, 1), (0, 0), (1, 1))
    dy = torch.rand_like(r)
    found, expected = both("conv", [x.abs(), v.abs(), g.abs(), None, None], geometry, dy=dy)
    for name in ("y", "dx", "dg"):
        error = (found[name].double() - expected[name]) / expected[name]
        assert abs(bias(found[name], expected[name])) < 5e-5, name
        assert 1e-5 < error.abs().max() < 2e-3, name


def test_a_sum_over_many_pixels_is_split():
    """Several parts, the last one short."""
    tensors, geometry = sample(3, 2, (13, 11), 3, (3, 3), (1, 1), (1, 1), (1, 1))
    assert configurations.splits(2, 429, SMALL.m) > 1
    with configurations.forced(SMALL):
        check(*both("conv", tensors, geometry, activation="relu"), torch.float32)


@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_only_what_is_needed(needs):
    tensors, geometry = sample(*GEOMETRIES[0])
    found, expected = both("conv", tensors, geometry, activation="relu", needs=tuple(map(bool, needs)))
    check(found, expected, torch.float32)


def test_layouts():
    tensors, geometry = sample(*GEOMETRIES[0])
    x, v, g, b, r = tensors
    wide = torch.randn(2, 3, 6, 10, device=DEVICE)
    wide[..., ::2] = x
    strange = [wide[..., ::2], v.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3), g, b, r.transpose(2, 3)]
    strange[4] = r.transpose(2, 3).contiguous().transpose(2, 3)
    dy = torch.ones((), device=DEVICE).expand(r.shape)
    found, expected = both("conv", strange, geometry, activation="relu", dy=dy)
    check(found, expected, torch.float32)
    plain, _ = both("conv", tensors, geometry, activation="relu", dy=dy)
    for name in NAMES:
        torch.testing.assert_close(found[name], plain[name])


@pytest.mark.parametrize("way", ["fused", "vendor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_filters_give_zeros(dtype, way):
    tensors, geometry = sample(*GEOMETRIES[0], dtype, dtype)
    tensors[1][2] = 0
    tensors[3] = tensors[4] = None
    with strategy.forced(way):
        found, expected = both("conv", tensors, geometry)
    check(found, expected, dtype)
    assert not any(found[name][2].any() for name in ("dv", "dg", "norm"))
    assert not found["y"][:, 2].any()


def test_infinities_and_nan_come_out_as_the_reference_gives_them():
    tensors, geometry = sample(*GEOMETRIES[0])
    x = tensors[0]
    x[0, 0, 0, 0], x[1, 1, 2, 2], x[1, 2, 4, 4] = float("inf"), float("-inf"), float("nan")
    for activation in ("none", "relu"):
        found, _ = backend.conv(*tensors, *geometry, 0, activation, 0.1)
        # On the CPU: a GPU's convolution may be a transform, which spreads what is not finite.
        expected, _ = reference.conv(*(t.cpu() for t in tensors), *geometry, 0, activation, 0.1)
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------- the residual stage


def stage_sample(blocks, n, c, h, w, dtype=torch.float32):
    x = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    v, g = torch.randn(blocks, 2, c, c, 3, 3, device=DEVICE), torch.rand(blocks, 2, c, device=DEVICE) + 0.5
    return x, v, g, 0.1 * torch.randn(blocks, 2, c, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recompute", [0, 1, 2, 5])
def test_stage(dtype, recompute):
    """Against the reference on the same rounded operands; both backwards read the same maps, so no mask flips."""
    x, v, g, b = stage_sample(3, 2, 5, 4, 3, dtype)
    y, norm, maps = backend.residual_stage(x, v, g, b, 0.7, recompute, True)
    expected, norm64, maps64 = reference.residual_stage(x, v.double(), g.double(), b.double(), 0.7, recompute, True)
    assert y.dtype == dtype
    assert maps.dtype == maps64.dtype
    for found, wanted in ((y, expected), (norm, norm64), (maps, maps64)):
        assert relative(found, wanted) < TOLERANCE[dtype]
    if recompute and dtype != torch.float32:
        return  # what is computed again may differ by a rounding, and a mask with it
    dy = torch.randn_like(y)
    found = backend.residual_stage_backward(dy, v, g, b, norm, maps, 0.7, recompute, True)
    wanted = reference.residual_stage_backward(dy, v, g, b, norm, maps, 0.7, recompute, True)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert relative(one, other) < TOLERANCE[dtype]


def test_a_stage_that_recomputes_gives_the_same_bits():
    x, v, g, b = stage_sample(4, 1, 3, 4, 4)
    dy = torch.randn_like(x)
    found = []
    for recompute in (0, 1, 2, 3):
        y, norm, maps = backend.residual_stage(x, v, g, b, 1.0, recompute, True)
        found.append((y, *backend.residual_stage_backward(dy, v, g, b, norm, maps, 1.0, recompute, True)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4, 4), (2, 0, 3, 4, 4)], ids=["no blocks", "no images"])
def test_empty_stages(shape):
    x, v, g, b = stage_sample(*shape)
    y, norm, maps = backend.residual_stage(x, v, g, b, 1.0, 0, True)
    torch.testing.assert_close(y, x)
    dx, dv, dg, db = backend.residual_stage_backward(torch.ones_like(x), v, g, b, norm, maps, 1.0, 0, True)
    assert dx.shape == x.shape
    assert not any(t.any() for t in (dv, dg, db))


def test_a_stage_without_gradients_of_its_parameters_keeps_channels_last():
    x, v, g, b = stage_sample(2, 2, 3, 4, 5, torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    y, norm, maps = backend.residual_stage(x, v, g, b, 1.0, 0, True)
    dx, *rest = backend.residual_stage_backward(torch.ones_like(y), v, g, b, norm, maps, 1.0, 0, False)
    assert y.stride() == dx.stride() == x.stride()
    assert [(t.numel(), t.dtype) for t in rest] == [(0, torch.float32)] * 3
    assert backend.residual_stage(x, v, g, b, 1.0, 0, False)[2].numel() == 0


def test_the_vendors_way_needs_no_leave_to_write_torchs_flags(monkeypatch):
    """``torch.backends.disable_global_flags`` closes them, and so does an import of torch's own test helpers."""
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    assert torch.backends.flags_frozen()
    layer = wnfused.WNConv2d(3, 4, 3).to(DEVICE)
    x = torch.randn(2, 3, 6, 6, device=DEVICE, requires_grad=True)
    before = torch._C._get_cudnn_deterministic()
    with wnfused.use_backend("triton"), strategy.forced("vendor"):
        layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch._C._get_cudnn_deterministic() == before
