"""Norms over the layers, against norms computed by hand on the same network."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wnfused
from wnfused.diagnostics import layer_norms

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([0, 1, 2, 3, 4, 5])


pytestmark = pytest.mark.usefixtures("on_the_reference")


def mean_norm(x: Tensor) -> float:
    return sum(math.sqrt(row.square().sum()) for row in x.detach().flatten(1)) / len(x)


def test_a_plain_chain() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).double()
    measured = layer_norms(layers, IMAGES, TARGETS)
    assert [m.name for m in measured] == ["0", "3"]
    hidden = layers[0](IMAGES)
    outputs = layers[3](hidden.relu().flatten(1))
    gradients = torch.autograd.grad(F.cross_entropy(outputs, TARGETS, reduction="sum"), [hidden, outputs])
    for m, output, gradient in zip(measured, (hidden, outputs), gradients, strict=True):
        assert m.activation == pytest.approx(mean_norm(output), rel=1e-12)
        assert m.gradient == pytest.approx(mean_norm(gradient), rel=1e-12)


def test_a_stacked_stage_is_measured_block_by_block() -> None:
    """As the same network made of separate blocks is."""
    torch.manual_seed(0)
    stacked = wnfused.models.wrn(22, in_channels=3).double()
    blocks = wnfused.models.wrn(22, in_channels=3).double()
    blocks.stem, blocks.head = stacked.stem, stacked.head
    blocks.stages = nn.Sequential(*(stage.unstack() for stage in stacked.stages))
    one, other = layer_norms(stacked, IMAGES, TARGETS), layer_norms(blocks, IMAGES, TARGETS)
    assert len(one) == len(other) == 1 + 9 + 1
    assert [m.name for m in one[:3]] == ["stem", "stages.0.blocks.0", "stages.0.blocks.1"]
    assert "stages.1.transition" in [m.name for m in one]
    for a, b in zip(one, other, strict=True):
        assert a.activation == pytest.approx(b.activation, rel=1e-10)
        assert a.gradient == pytest.approx(b.gradient, rel=1e-10)


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_the_twins_have_the_same_stations(norm: str) -> None:
    model = wnfused.models.wrn(16, norm=norm).double()
    assert len(layer_norms(model, IMAGES, TARGETS)) == 1 + 6 + 1


def test_nothing_is_left_behind() -> None:
    model = wnfused.models.wrn(16).double()
    before = {name: p.clone() for name, p in model.named_parameters()}
    logits = model(IMAGES)
    layer_norms(model, IMAGES, TARGETS)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model(IMAGES), logits)


def test_nothing_is_left_behind_by_an_error() -> None:
    model = wnfused.models.wrn(16).double()
    with pytest.raises(ValueError, match="does not fit"):
        layer_norms(model, IMAGES[:, :1], TARGETS)
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())


def test_gradients_do_not_depend_on_the_number_of_samples() -> None:
    model = wnfused.models.wrn(16).double()
    one = layer_norms(model, IMAGES[:1], TARGETS[:1])
    twice = layer_norms(model, IMAGES[:1].repeat(2, 1, 1, 1), TARGETS[:1].repeat(2))
    assert [m.gradient for m in one] == pytest.approx([m.gradient for m in twice], rel=1e-12)


def test_frozen_parameters_and_no_grad_do_not_matter() -> None:
    model = wnfused.models.wrn(16).double()
    expected = layer_norms(model, IMAGES, TARGETS)
    model.requires_grad_(False)
    with torch.no_grad():
        assert list(layer_norms(model, IMAGES, TARGETS)) == list(expected)


def test_a_filter_and_an_in_place_activation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10)).double()
    measured = layer_norms(model, IMAGES, TARGETS, filter=lambda name, module: isinstance(module, nn.Conv2d))
    assert [m.name for m in measured] == ["0"]
    assert measured[0].activation == pytest.approx(mean_norm(F.conv2d(IMAGES, model[0].weight, model[0].bias)))


def test_another_loss() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 1)).double()
    measured = layer_norms(model, IMAGES, torch.zeros(6), loss=lambda outputs, targets: 3 * outputs.sum())
    assert measured[-1].gradient == pytest.approx(3)


def test_without_samples() -> None:
    with pytest.raises(ValueError, match=r"inputs: shape \[0, 3, 8, 8\]"):
        layer_norms(nn.Flatten(), torch.zeros(0, 3, 8, 8))


def test_no_station_has_no_norm() -> None:
    profile = layer_norms(nn.Linear(2, 2), torch.ones(3, 2), filter=lambda name, module: False)
    assert len(profile) == 0
    bands = (*profile.activation_band(), *profile.gradient_band())
    assert all(a.shape == (0,) for a in (profile.expected_activation(), profile.expected_gradient(), *bands))


def test_slices_and_filters_keep_the_growth_of_what_they_leave_out() -> None:
    model = wnfused.models.wrn(40).double()
    model.stages[1] = model.stages[1].unstack()
    profile = layer_norms(model, IMAGES, TARGETS)
    expected, band = profile.expected_activation(), profile.activation_band()
    kept = [0, 4, 8, 12, 16]
    assert profile[:17:4].expected_activation() == pytest.approx(expected[kept], rel=1e-12)
    for one, other in zip(profile[:17:4].activation_band(), band, strict=True):
        assert one == pytest.approx(other[kept], rel=1e-12)
    gradient = profile[:17].expected_gradient()
    assert profile[:17:4].expected_gradient() == pytest.approx(gradient[kept], rel=1e-12)

    names = {profile.names[i] for i in (0, 7, 10, 13)} | {"head"}
    chosen = layer_norms(model, IMAGES, TARGETS, filter=lambda name, module: name in names)
    which = [profile.names.index(name) for name in chosen.names]
    assert (len(which), chosen.heads) == (len(names), 1)
    assert chosen.activation == pytest.approx(profile.activation[which], rel=1e-12)
    assert chosen.gradient == pytest.approx(profile.gradient[which], rel=1e-12)
    assert chosen.expected_activation() == pytest.approx(expected[which], rel=1e-12, nan_ok=True)
    for one, other in zip(chosen.gradient_band(), profile.gradient_band(), strict=True):
        ratio = (one / other[which])[:-1]
        assert ratio == pytest.approx(ratio[0], rel=0.2)


def test_a_profile_turned_round_keeps_its_head() -> None:
    profile = layer_norms(wnfused.models.wrn(16).double(), IMAGES, TARGETS)
    turned = profile[::-1]
    assert turned.head.tolist() == [True] + [False] * 7
    assert turned.heads == 1
    for values in (turned.expected_activation(), turned.expected_gradient()):
        assert math.isnan(values[0])
        assert not any(math.isnan(value) for value in values[1:])
    for low, high in (turned.activation_band(), turned.gradient_band()):
        assert (low[1:] <= high[1:]).all()
    assert all(math.isnan(value) for value in profile[-1:].expected_activation())


def test_a_stage_that_is_the_model() -> None:
    profile = layer_norms(wnfused.WNResidualStage(3, 4, 3).double(), IMAGES, TARGETS, loss=lambda out, _: out.sum())
    assert profile.names == ("transition", "blocks.0", "blocks.1")
    assert profile.blocks.tolist() == [3, 3, 3]


def test_a_loss_that_needs_no_logits_needs_targets() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 1), nn.Flatten(0)).double()
    with pytest.raises(TypeError, match=r"model: expected logits .* got a tensor of shape \[6\]; give targets"):
        layer_norms(model, IMAGES, loss=lambda outputs, targets: outputs.sum())


@pytest.mark.parametrize("options", [{"filter": "a"}, {"loss": "ce"}])
def test_what_is_no_function(options) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=f"{name}: expected a function, got '{options[name]}'"):
        layer_norms(nn.Linear(2, 2), torch.ones(3, 2), **options)
