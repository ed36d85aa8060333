"""Rows of a single entry: all of the gradient lies along v, and that of its direction is 0, not what rounding leaves.

Adam follows a gradient whatever its size: what rounding leaves would move v, and turn its sign, where nothing should.
"""

import pytest
import torch

import wnfused
from wnfused import functional as F

LAYERS = {
    "linear, 1 to 3": (wnfused.WNLinear, (1, 3), {}, (6, 1)),
    "linear, 1 to 40": (wnfused.WNLinear, (1, 40), {}, (33, 1)),
    "linear, 1 to 40, one sample": (wnfused.WNLinear, (1, 40), {}, (1, 1)),
    "linear, 1 to 5, one sample": (wnfused.WNLinear, (1, 5), {}, (1, 1)),
    "one channel in": (wnfused.WNConv2d, (1, 64, 1), {}, (2, 1, 14, 14)),
    "one channel in, by 2": (wnfused.WNConv2d, (1, 12, 1), {"stride": 2}, (3, 1, 9, 9)),
    "depthwise, one dim": (wnfused.WNConv1d, (8, 24, 1), {"groups": 8}, (3, 8, 40)),
    "depthwise": (wnfused.WNConv2d, (16, 16, 1), {"groups": 16}, (2, 16, 14, 14)),
    "depthwise, one pixel": (wnfused.WNConv2d, (16, 16, 1), {"groups": 16}, (32, 16, 1, 1)),
    "depthwise, by 2": (wnfused.WNConv2d, (3, 9, 1), {"groups": 3, "stride": 2}, (1, 3, 14, 14)),
    "depthwise, three dims": (wnfused.WNConv3d, (4, 4, 1), {"groups": 4}, (2, 4, 5, 5, 5)),
    "transposed, one channel out": (wnfused.WNConvTranspose2d, (64, 1, 1), {}, (2, 64, 9, 9)),
    "transposed, depthwise": (wnfused.WNConvTranspose2d, (8, 8, 1), {"groups": 8, "stride": 2}, (2, 8, 9, 9)),
    "transposed, one dim": (wnfused.WNConvTranspose1d, (16, 1, 1), {}, (3, 16, 20)),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_the_direction_of_a_single_entry_has_no_gradient(name, dtype, last, backend):
    kind, arguments, options, shape = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    layer = kind(*arguments, **options, activation="relu").to(dtype)
    x = torch.randn(shape, generator=generator).to(dtype)
    with torch.no_grad():
        layer.weight_v.copy_(0.01 * torch.randn(layer.weight_v.shape, generator=generator))
    if last and x.dim() == 4:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with wnfused.use_backend(backend):
        for needed in (False, True):
            layer.zero_grad()
            y = layer(x.detach().requires_grad_(needed))
            y.backward(torch.randn(y.shape, generator=generator).to(dtype))
            assert (layer.weight_v.grad == 0).all()
            assert layer.weight_g.grad.abs().max() > 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), [((30, 1), 0), ((1, 30), 1), ((1, 30, 1), 1), ((1,), None)])
def test_the_norm_alone(shape, dim, dtype, backend):
    generator = torch.Generator().manual_seed(0)
    v = (0.01 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    g = torch.rand(max(shape) if dim is not None else (), generator=generator).to(dtype).requires_grad_()
    with wnfused.use_backend(backend):
        w = F.weight_norm(v, g, dim)
    w.backward(torch.randn(shape, generator=generator).to(dtype))
    assert (v.grad == 0).all()
    assert g.grad.abs().max() > 0


@pytest.mark.parametrize("function", [lambda x, v, g: F.linear(x, v, g), lambda x, v, g: F.conv1d(x, v, g)])
def test_what_is_not_finite_is_told(function):
    is_linear = function.__code__.co_names[-1] == "linear"
    v = torch.ones(20, 1) if is_linear else torch.ones(20, 1, 1)
    x = torch.ones(4, 1) if is_linear else torch.ones(4, 1, 6)
    v.requires_grad_()
    y = function(x, v, torch.ones(20, requires_grad=True))
    dy = torch.ones_like(y)
    dy.select(1, 3).fill_(torch.inf)
    (dv,) = torch.autograd.grad(y, v, dy)
    assert dv[3].isnan().all()
    assert (dv.flatten()[:3] == 0).all()
