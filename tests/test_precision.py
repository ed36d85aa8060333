"""Mixed precision as torch has it, and the function transforms of ``torch.func`` on whole layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import wnfused
from wnfused import WNConv1d, WNConv2d, WNConv3d, WNConvTranspose2d, WNLinear, WNResidualBlock, WNResidualStage

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
LAYERS = {
    "linear": (lambda: WNLinear(6, 5, activation="relu"), (4, 6)),
    "linear-dim-1": (lambda: WNLinear(6, 5, dim=1), (4, 6)),
    "conv1d-dim-2": (lambda: WNConv1d(6, 5, 3, dim=2), (4, 6, 9)),
    "conv2d": (lambda: WNConv2d(6, 5, 3, padding=1, activation="leaky_relu"), (4, 6, 5, 5)),
    "conv3d": (lambda: WNConv3d(6, 5, 2), (2, 6, 3, 3, 3)),
    "transpose": (lambda: WNConvTranspose2d(6, 5, 4, 2, 1), (2, 6, 3, 3)),
    "block": (lambda: WNResidualBlock(6, 8, 2), (2, 6, 5, 5)),
    "stage": (lambda: WNResidualStage(6, 6, 2), (2, 6, 5, 5)),
    "stage-wide": (lambda: WNResidualStage(6, 16, 3, 2), (2, 6, 8, 8)),
}

the_stage_has_no_kernel_for_some = pytest.mark.filterwarnings("ignore::wnfused.dispatch.BackendWarning")


@the_stage_has_no_kernel_for_some
@pytest.mark.parametrize("input_is_half", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_runs_in_half_precision_over_full_precision_parameters(name, dtype, input_is_half):
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    x = x.to(dtype).requires_grad_() if input_is_half else x.requires_grad_()
    weights = torch.randn_like(layer(x.float()))
    exact = torch.autograd.grad((layer(x.float()) * weights).sum(), (x, *layer.parameters()))
    expected = layer(x.float()).detach()
    plain = wnfused.fold(make())
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert y.dtype == dtype
        assert not isinstance(layer, nn.modules.conv._ConvNd | nn.Linear) or plain(x).dtype == dtype
        loss = (y.float() * weights).sum()
    found = torch.autograd.grad(loss, (x, *layer.parameters()))
    # A handful of chained layers, each with operands and output rounded, sums of up to 144 terms; and masks may flip.
    bound = 60 * HALVES[dtype]
    assert (y - expected).abs().max() < bound * expected.abs().max()
    for gradient, wanted, tensor in zip(found, exact, (x, *layer.parameters()), strict=True):
        assert gradient.dtype == tensor.dtype
        assert (gradient.float() - wanted.float()).norm() <= 2 * bound * wanted.float().norm() + 1e-3


@the_stage_has_no_kernel_for_some
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_into_one_half_with_parameters_in_the_other(name, dtype):
    """As torch's own layers have it: the parameters are cast along."""
    (other,) = HALVES.keys() - {dtype}
    make, shape = LAYERS[name]
    layer, x = make().to(other), torch.randn(shape)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert all(parameter.grad.dtype == other for parameter in layer.parameters())
    with torch.no_grad():
        exact = layer.double()(x.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2**-5 * exact.abs().max().item())


def test_autocast_off_within_on_and_residuals():
    layer, x = WNLinear(4, 4), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, x).dtype == torch.bfloat16
        assert layer(x.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        assert layer.weight.dtype == torch.float32


def test_a_grad_scaler_scales_skips_and_recovers():
    layer = nn.Sequential(WNLinear(4, 8, activation="relu"), WNLinear(8, 2))
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(6, 4)
    layer(x).square().mean().backward()
    wanted = [p.grad.clone() for p in layer.parameters()]

    def step(factor):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = layer(x).square().float().mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        found = [p.grad.clone() for p in layer.parameters()]
        before = [p.clone() for p in layer.parameters()]
        scaler.step(optimiser)
        scaler.update()
        return found, any(not torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))

    found, moved = step(1.0)
    assert moved
    for gradient, expected in zip(found, wanted, strict=True):
        assert (gradient - expected).norm() < 0.02 * expected.norm()
    _, moved = step(float("inf"))
    assert not moved
    assert scaler.get_scale() == 2.0**9
    _, moved = step(1.0)
    assert moved


# --------------------------------------------------------------------------------------------------------- torch.func


def squares(layer, parameters, x):
    return functional_call(layer, parameters, (x,)).square().sum()


@the_stage_has_no_kernel_for_some
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_by_grad_vmap_and_jvp(name):
    make, shape = LAYERS[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}
    expected = dict(zip(parameters, torch.autograd.grad(layer(x).square().sum(), layer.parameters()), strict=True))
    found = grad(lambda p: squares(layer, p, x))(parameters)
    for n, gradient in expected.items():
        torch.testing.assert_close(found[n], gradient)

    each = vmap(grad(lambda p, row: squares(layer, p, row[None])), in_dims=(None, 0))(parameters, x)
    for n, gradient in expected.items():
        torch.testing.assert_close(each[n].sum(0), gradient)

    tangents = {n: torch.randn_like(p) for n, p in parameters.items()}
    _, along = jvp(lambda p: squares(layer, p, x), (parameters,), (tangents,))
    torch.testing.assert_close(along, sum((expected[n] * tangents[n]).sum() for n in parameters))


_ENSEMBLES = {
    "linear": (lambda: nn.Sequential(WNLinear(4, 6, activation="relu"), WNLinear(6, 2)), (5, 4)),
    "channels_last": (lambda: WNConv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 9, 9)),
    "channels_last_3d": (lambda: WNConv3d(4, 6, 3).to(memory_format=torch.channels_last_3d), (2, 4, 5, 5, 5)),
    "stage": (lambda: WNResidualStage(4, 6, 2, 2).to(memory_format=torch.channels_last), (2, 4, 9, 9)),
}


@pytest.mark.parametrize("kind", _ENSEMBLES)
def test_an_ensemble_runs_as_one(kind):
    build, shape = _ENSEMBLES[kind]
    models = [build() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(shape)
    found = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    gradients = vmap(grad(lambda p, b: functional_call(models[0], (p, b), (x,)).square().sum()))(parameters, buffers)
    for i, (y, model) in enumerate(zip(found, models, strict=True)):
        torch.testing.assert_close(y, model(x))
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, rtol=1e-4, atol=1e-5)


def test_hessians_forward_over_reverse_and_back():
    layer, x = WNLinear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    v = layer.weight_v.detach()

    def loss(v):
        return squares(layer, {"weight_v": v, "weight_g": layer.weight_g, "bias": layer.bias}, x)

    def composite(v):
        w = v * (layer.weight_g / v.norm(dim=1, keepdim=True))
        return F.linear(x, w, layer.bias).square().sum()

    expected = torch.autograd.functional.hessian(composite, v)
    for second in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(jacfwd(f))):
        torch.testing.assert_close(second(loss)(v), expected)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, v), expected)
