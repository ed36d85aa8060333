"""Models whose ``forward`` goes another way once a layer is of another class: ``convert`` compares, parts or warns."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import wnfused
from wnfused.convert import FusedActivation

pytestmark = pytest.mark.usefixtures("one_thread")

old, new = nn.utils.weight_norm, parametrizations.weight_norm


class Features(nn.Module):
    """Returns what comes out of the modules that ``picks`` says, as perceptual losses do."""

    def __init__(self, picks):
        super().__init__()
        self.net = nn.Sequential(new(nn.Linear(4, 5)), nn.LeakyReLU(0.2), new(nn.Linear(5, 6)), nn.LeakyReLU(0.2))
        self.picks = picks

    def forward(self, x):
        found = []
        for i, module in enumerate(self.net):
            x = module(x)
            if self.picks(i, module):
                found.append(x)
        return found


PICKS = {
    "isinstance": lambda i, module: isinstance(module, nn.LeakyReLU),
    "type": lambda i, module: type(module) is nn.LeakyReLU,
    "attribute": lambda i, module: hasattr(module, "negative_slope") and not hasattr(module, "weight"),
    "name": lambda i, module: "ReLU" in type(module).__name__,
}


@pytest.mark.parametrize("picks", PICKS)
def test_a_forward_that_asks_for_activations_finds_them(picks, caplog):
    model, x = Features(PICKS[picks]), torch.randn(3, 4)
    expected = model(x)
    wnfused.convert(model)
    for found, feature in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, feature)
    assert [type(module) for module in model.net] == [wnfused.WNLinear, nn.LeakyReLU] * 2
    for name in ("net.0", "net.2"):
        assert f"{name}: forward goes another way where its activation is fused" in caplog.text
    assert "what it computes may have changed" not in caplog.text


def test_a_forward_that_asks_for_places_only_is_fused(caplog):
    model, x = Features(lambda i, module: i in (1, 3)), torch.randn(3, 4)
    expected = model(x)
    wnfused.convert(model)
    for found, feature in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, feature)
    assert isinstance(model.net[1], FusedActivation)
    assert not caplog.records


CALLS = {
    "forward": lambda layer, x: layer.forward(x),
    "checkpoint": lambda layer, x: checkpoint(layer.forward, x, use_reentrant=False),
    "keyword": lambda layer, x: layer.forward(input=x),
}


class CallsForward(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.net, self.how = nn.Sequential(new(nn.Linear(4, 4)), nn.ReLU()), how

    def forward(self, x):
        return self.net(x) + self.how(self.net[0], x)


@pytest.mark.parametrize("how", CALLS)
def test_a_layer_whose_forward_is_called_by_name_keeps_its_activation_apart(how, caplog):
    model, x = CallsForward(CALLS[how]), torch.randn(3, 4)
    expected = model(x)
    wnfused.convert(model)
    torch.testing.assert_close(model(x), expected)
    assert "forward" not in vars(model.net[0])
    assert not caplog.records


class ExactLayers(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layers = nn.ModuleList([norm(nn.Linear(4, 4)), norm(nn.Linear(4, 4))])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if type(layer) is nn.Linear else x
        return x


@pytest.mark.parametrize("norm", [old, lambda layer: layer], ids=["old", "plain"])
@pytest.mark.parametrize("compared", [True, False])
def test_a_forward_that_asks_for_exact_layers_is_warned_of(norm, compared, caplog):
    """Nothing can be done for it; without a look, which nobody then wants, it cannot be known either."""
    wnfused.convert(ExactLayers(norm), plain=True, fuse_activation=compared)
    assert ("forward goes another way than before" in caplog.text) == compared


class Held(nn.Module):
    """What convert cannot see: a closure's layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        inner = self.inner
        self.run = lambda x: inner(x)

    def forward(self, x):
        return self.outer(self.run(x))


def test_a_layer_that_is_no_longer_called_is_named(caplog):
    wnfused.convert(Held(), plain=True)
    assert "does something hold a layer that was replaced? Not called any more: inner" in caplog.text


class Reads(nn.Module):
    """Reads weights and shapes of its layers, and computes with them."""

    def __init__(self, norm):
        super().__init__()
        self.a, self.b = norm(nn.Linear(4, 4)), norm(nn.Linear(4, 4))

    def forward(self, x):
        y = torch.relu(self.a(x)) * self.b.weight.norm() + self.b.bias
        return nn.functional.linear(y, self.b.weight, self.a.bias).view(-1, self.a.out_features)[:, :2]


@pytest.mark.parametrize("norm", [old, new, lambda layer: layer], ids=["old", "new", "plain"])
def test_a_forward_that_reads_weights_goes_the_same_way(norm, caplog):
    model, x = Reads(norm), torch.randn(3, 4)
    expected = model(x)
    torch.testing.assert_close(wnfused.convert(model, plain=True)(x), expected)
    assert not caplog.records


def casts(layer, x):
    return x.to(layer.weight.device, layer.weight.dtype)


def shapes(layer, x):
    return x.view(-1, layer.weight.shape[1])[:, : layer.weight.size(1)]


def branches(layer, x):
    weight = layer.weight * 2
    return x if weight.ndim == 2 == weight.dim() and weight.T.dtype is torch.float32 else x.half()


def computes(layer, x):
    return x.type_as(layer.weight) * layer.weight.norm()


class AsksWeights(nn.Module):
    """Learns from a layer's weight what to do with its input."""

    def __init__(self, norm, asks):
        super().__init__()
        self.a, self.net = norm(nn.Linear(4, 4)), nn.Sequential(norm(nn.Linear(4, 4)), nn.ReLU())
        self.asks = asks

    def forward(self, x):
        return self.net(self.a(self.asks(self.a, x)))


@pytest.mark.parametrize("norm", [old, new, lambda layer: layer], ids=["old", "new", "plain"])
@pytest.mark.parametrize("asks", [casts, shapes, branches, computes])
def test_a_forward_that_asks_what_a_weight_is_goes_the_same_way(norm, asks, caplog):
    model, x = AsksWeights(norm, asks), torch.randn(3, 4)
    expected = model(x)
    torch.testing.assert_close(wnfused.convert(model, plain=True)(x), expected)
    assert model.net[0].activation == "relu"
    assert not caplog.records


class TakesResiduals(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = wnfused.WNConv2d(3, 3, 3, padding=1), wnfused.WNLinear(5, 5)
        self.transposed = nn.ModuleList([wnfused.WNConvTranspose2d(3, 3, 2, 2), wnfused.WNConvTranspose2d(3, 3, 1)])

    def forward(self, x):
        y = self.linear(self.conv(x, x), x)
        return self.transposed[1](y, residual=self.transposed[0](y, [10, 10])[..., ::2, ::2])


WRAPPERS = {
    "average": torch.optim.swa_utils.AveragedModel,
    "parallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(torch.optim.swa_utils.AveragedModel(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_is_looked_into(wrap, caplog):
    x = torch.randn(2, 3, 5, 5)
    model = WRAPPERS[wrap](TakesResiduals())
    expected = model(x)
    with caplog.at_level(logging.INFO, "wnfused.convert"):
        torch.testing.assert_close(wnfused.fold(model)(x), expected)
        sequence = nn.Sequential(new(nn.Linear(4, 4)), nn.ReLU())
        converted = wnfused.convert(WRAPPERS[wrap](copy.deepcopy(sequence)))
    assert [m.activation for m in converted.modules() if isinstance(m, wnfused.WNLinear)] == ["relu"]
    assert "does not trace" not in caplog.text
    torch.testing.assert_close(converted(x[..., :4]), sequence(x[..., :4]))


def test_layers_with_a_residual_can_be_scripted():
    x = torch.randn(2, 3, 5, 5)
    model = wnfused.fold(TakesResiduals())
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_folded_layers_with_a_residual_of_every_kind(dims):
    """Each is what it was, and can be scripted, with and without a residual."""
    from wnfused.nn.plain import WITH_RESIDUAL

    size = [5] * dims
    for kind, extra in ((f"Conv{dims}d", {"padding_mode": "circular", "padding": 1}), (f"ConvTranspose{dims}d", {})):
        ours = WITH_RESIDUAL[getattr(nn, kind)](4, 4, 3, groups=2, dilation=1, **extra)
        plain = getattr(nn, kind)(4, 4, 3, groups=2, dilation=1, **extra)
        plain.load_state_dict(ours.state_dict())
        x = torch.randn(2, 4, *size)
        expected = plain(x)
        for layer in (ours, torch.jit.script(ours)):
            assert torch.equal(layer(x), expected)
            assert torch.equal(layer(x, residual=expected), expected + expected)
