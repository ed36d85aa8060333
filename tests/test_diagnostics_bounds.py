"""The theory of norms against Monte Carlo and its printed forms, and the lower bounds on gradients by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import gaussian
from torch import Tensor, nn

import wnfused
from wnfused import init
from wnfused.diagnostics import (
    STAGE_BAND,
    activation_gradient_bounds,
    homogeneous_sets,
    layer_constant,
    layer_norms,
    mlp_growth,
    parameter_gradient_bounds,
    resnet_growth,
    stage_growth,
)

pytestmark = pytest.mark.usefixtures("on_the_reference")


# ------------------------------------------------------------------------------------------------- the theory


def test_the_constant_of_theorem_1_is_one() -> None:
    assert [layer_constant(n) for n in (2, 3, 4, 5, 10, 101, 5000)] == pytest.approx([1] * 7, rel=1e-9)
    # n = 3 by hand: 2 S_2 / S_3 * 1/2 * pi/2 with S_2 = 4 pi and S_3 = 2 pi^2.
    assert layer_constant(3) == pytest.approx(2 * 4 * math.pi / (2 * math.pi**2) * math.pi / 4)
    with pytest.raises(ValueError, match="n: 1 must be an int of at least 2"):
        layer_constant(1)
    assert layer_constant(np.int64(4)) == layer_constant(4)
    assert stage_growth(np.int64(5)) == stage_growth(5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stage_growth(math.nan), "num_blocks: nan must be an int of at least 1"),
        (lambda: resnet_growth(2.5), "num_blocks: 2.5 must be an int of at least 1"),
        (lambda: layer_constant(2.5), "n: 2.5 must be an int of at least 2"),
        (lambda: mlp_growth([3, math.nan]), r"widths: \[3, nan\] must be at least two numbers"),
        (lambda: mlp_growth([3, math.inf]), r"widths: \[3, inf\] must be .* each finite and at least 1"),
    ],
)
def test_growths_count(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mlp_growth("wide"), "widths: expected numbers, got 'wide'"),
        (lambda: mlp_growth([3, None]), r"widths: expected numbers, got \[3, None\]"),
        (lambda: mlp_growth([3, 4], proposed="no"), "proposed: 'no' must be True or False"),
        (lambda: resnet_growth(3, proposed="no"), "proposed: 'no' must be True or False"),
    ],
)
def test_growths_of_wrong_types(call, message) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_stage_stays_in_its_band() -> None:
    growth = [stage_growth(b) for b in (1, 2, 40, 10**6)]
    assert growth == sorted(growth)
    assert growth[0] == pytest.approx(STAGE_BAND[0])
    assert growth[2] == pytest.approx(1.639, abs=5e-4)
    assert STAGE_BAND[1] - 1e-6 < growth[-1] < STAGE_BAND[1]
    assert resnet_growth(40)[[0, -1]] == pytest.approx([1, stage_growth(40)])
    assert resnet_growth(20, proposed=False)[-1] ** 2 == pytest.approx(3325.26, rel=1e-6)


@pytest.mark.parametrize("proposed", [True, False])
def test_the_closed_forms_of_a_perceptron_by_monte_carlo(proposed: bool) -> None:
    """Over 40 networks the mean square scatters by about sqrt(sum 5/n_l / 40) = 4% (K_n's variance is 5/n a layer)."""
    widths = [40, 60, 30, 50]
    forward, backward = np.zeros(4), np.zeros(4)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, 40, generator=generator, dtype=torch.float64)
        x0, hidden = x, []
        for a, b in itertools.pairwise(widths):
            w = F.normalize(torch.randn(b, a, generator=generator, dtype=torch.float64), dim=1)
            hidden.append((w * math.sqrt(2 * a / b) if proposed else w, x))
            x = F.relu(F.linear(x, hidden[-1][0]))
            forward[len(hidden)] += (x.norm(dim=1) / x0.norm(dim=1)).square().mean().item() / 40
        error = torch.randn(64, widths[-1], generator=generator, dtype=torch.float64)
        at_end, d = error.square().sum(1).mean(), error
        backward[-1] += 1 / 40
        for i in (2, 1):  # dl/da^l = 1(a^l) * W_{l+1}^T dl/da^{l+1}
            d = (d @ hidden[i][0]) * (hidden[i][1] > 0)
            backward[i] += (d.square().sum(1).mean() / at_end).item() / 40
    expected_forward, expected_backward = mlp_growth(widths, proposed=proposed)
    assert forward[1:] == pytest.approx(expected_forward[1:] ** 2, rel=0.15)
    assert backward[1:] == pytest.approx(expected_backward[1:] ** 2, rel=0.15)


def test_a_network_follows_the_expected_norms() -> None:
    model = wnfused.models.wrn(40, width=2).double()
    profile = layer_norms(model, gaussian(8, 3, 16, 16))
    assert profile.heads == 1
    assert np.isnan(profile.expected_activation()[-1])
    assert profile.blocks.tolist() == [0, *[6] * 18, 0]
    for measured, expected, band in (
        (profile.activation, profile.expected_activation(), profile.activation_band()),
        (profile.gradient, profile.expected_gradient(), profile.gradient_band()),
    ):
        ratio = (measured / expected)[:-1]
        # Borders cost a little at every 3x3 convolution, most on the 4 x 4 maps of the last stage.
        assert ((ratio > 0.6) & (ratio < 1.5)).all(), ratio
        low, high = (b[:-1] for b in band)
        assert ((low <= expected[:-1] * (1 + 1e-12)) & (expected[:-1] <= high * (1 + 1e-12))).all()
    low, high = profile.activation_band()
    # Three stages from the stem's 256 positions to 16.
    assert low[-2] / profile.activation[0] == pytest.approx(STAGE_BAND[0] ** 3 / 4)
    assert high[-2] / profile.activation[0] == pytest.approx(STAGE_BAND[1] ** 3 / 4)


def test_a_profile_is_a_sequence() -> None:
    profile = layer_norms(wnfused.models.wrn(16, norm="none").double(), gaussian(3, 3, 8, 8))
    assert profile.blocks.tolist() == [0, *[2] * 6, 0]
    shorter = profile[1:-1]
    assert (len(shorter), shorter.heads, profile.heads) == (6, 0, 1)
    assert shorter.names == profile.names[1:-1]
    assert profile[0].activation == pytest.approx(profile.activations[0].mean())
    assert profile.activations.shape == profile.gradients.shape == (8, 3)
    assert profile.inputs == pytest.approx(gaussian(3, 3, 8, 8).flatten(1).norm(dim=1).numpy())


def test_integers_in_and_several_outputs() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(7, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(tokens))[0][:, -1])

    model, tokens = Tokens().double(), torch.tensor([[1, 2], [3, 4]])
    profile = layer_norms(model, tokens, torch.tensor([0, 1]))
    assert profile.names == ("embed", "rnn", "head")
    embedded = model.embed(tokens).detach().requires_grad_()
    F.cross_entropy(model.head(model.rnn(embedded)[0][:, -1]), torch.tensor([0, 1]), reduction="sum").backward()
    assert profile.gradients[0] == pytest.approx(embedded.grad.flatten(1).norm(dim=1).numpy())


def test_torch_s_weight_norm_has_one_station_a_layer() -> None:
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, bias=False).double())
    profile = layer_norms(nn.Sequential(linear, nn.ReLU(), nn.Linear(3, 2).double()), gaussian(2, 4))
    assert profile.names == ("0", "2")
    assert profile[-1] == profile[1]
    assert profile[np.int64(-1)] == profile[-1]
    with pytest.raises(IndexError, match="station 2 is out of range: 2 were measured"):
        profile[2]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_torch_s_weight_norm_is_no_head() -> None:
    def layers() -> tuple[nn.Module, ...]:
        return nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)

    for weight_norm in (torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm):
        model = nn.Sequential(*layers())
        weight_norm(model[0])
        weight_norm(model[2])
        assert layer_norms(model, torch.randn(2, 4)).heads == 1


class Backbone(nn.Module):
    """Frozen the way that feature extractors are."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.neck, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(self.neck(x.relu()))


def test_gradients_begin_after_a_cut() -> None:
    model, x, targets = Backbone().double(), gaussian(4, 5), torch.arange(4) % 3
    found = layer_norms(model, x, targets).gradients
    h = model.neck(model.frozen(x).relu()).detach().requires_grad_()
    F.cross_entropy(model.head(h), targets, reduction="sum").backward()
    assert np.isnan(found[0]).all()
    assert found[1] == pytest.approx(h.grad.norm(dim=1).numpy(), rel=1e-12)
    assert np.isnan(activation_gradient_bounds(model, x, targets).gradients[0]).all()
    wholly = nn.Sequential(model, nn.Identity())
    wholly[1].register_forward_hook(lambda module, inputs, output: output.detach())
    assert np.isnan(layer_norms(wholly, x, targets).gradients).all()


# --------------------------------------------------------------------------------------------- lower bounds


def residual_network() -> nn.Module:
    """Without biases, so that it is positively homogeneous."""
    model = wnfused.models.wrn(16, norm="none").double()
    init.initialize(model, "arpit2019", generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(0 if name.endswith("bias") else 1.5)
    return model


IMAGES, TARGETS = gaussian(6, 3, 8, 8), torch.arange(6)


def test_theorem_1_by_hand_and_that_it_holds() -> None:
    model = residual_network()
    measured = activation_gradient_bounds(model, IMAGES, TARGETS)
    logits = model(IMAGES).detach()
    p = F.softmax(logits, 1)
    excess = F.cross_entropy(logits, TARGETS, reduction="none") - torch.special.entr(p).sum(1)
    stem = model.stem(IMAGES).flatten(1).detach()
    assert measured.bounds[0] == pytest.approx((excess / stem.norm(dim=1)).numpy(), rel=1e-9)
    assert measured.bounds[-1] == pytest.approx((excess / logits.norm(dim=1)).numpy(), rel=1e-9)
    assert (measured.gradients >= measured.bounds * (1 - 1e-12)).all()
    assert (measured.bounds > 0).any()


@pytest.mark.parametrize("norm", ["none", "weight"])
def test_theorem_2_by_hand_and_that_it_holds(norm: str) -> None:
    model = residual_network() if norm == "none" else wnfused.models.wrn(16).double()
    nn.init.zeros_(model.head.bias)
    measured = parameter_gradient_bounds(model, IMAGES, TARGETS, batch_size=4)
    transition = "stages.1.0" if norm == "none" else "stages.1.transition"
    assert measured.names[:2] == ("stem", f"{transition}.shortcut + {transition}.conv2")
    assert measured.names[-1] == "head"
    assert measured.homogeneous.all()
    assert (measured.gradient >= measured.bound * (1 - 1e-12)).all()
    weight = "weight" if norm == "none" else "weight_g"
    loss = F.cross_entropy(model(IMAGES), TARGETS)
    parameters = [getattr(model.stem, weight), model.stem.bias]
    gradients = torch.autograd.grad(loss, parameters)
    logits = model(IMAGES).detach()
    p = F.softmax(logits, 1)
    excess = (loss - torch.special.entr(p).sum(1).mean()).item()
    size = math.hypot(*(t.norm().item() for t in parameters))
    assert measured.gradient[0] == pytest.approx(math.hypot(*(g.norm().item() for g in gradients)), rel=1e-9)
    assert measured.bound[0] == pytest.approx(excess / size, rel=1e-9)
    assert measured.expected[0] == pytest.approx((logits.amax(1).mean().item() - math.log(10)) / size, rel=1e-9)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_sets_that_are_not_homogeneous_are_found_out() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Tanh(), nn.Linear(5, 10)).double()
    measured = parameter_gradient_bounds(model, IMAGES, TARGETS)
    assert measured.names == ("1", "3")
    assert measured.homogeneous.tolist() == [False, True]
    mine = parameter_gradient_bounds(model, IMAGES, TARGETS, sets={"half": ["3.weight"]})
    assert mine.homogeneous.tolist() == [False]  # its bias is not 0
    with pytest.raises(ValueError, match="sets: the model has no parameter 'x'"):
        parameter_gradient_bounds(model, IMAGES, TARGETS, sets={"half": ["x"]})


def test_dropout_is_homogeneous() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 10)).double()
    nn.init.zeros_(model[-1].bias)
    assert parameter_gradient_bounds(model.train(), IMAGES, TARGETS).homogeneous.all()


def test_logits_that_overflow_a_softmax() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).double()
    with torch.no_grad():
        model[1].weight.mul_(1e6)
    measured = activation_gradient_bounds(model, IMAGES, TARGETS)
    assert np.isfinite(measured.bounds).all()


def test_sets_of_torch_s_weight_norm() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2))
    assert homogeneous_sets(model, torch.zeros(1, 4)) == {
        "0": ("0.parametrizations.weight.original0", "0.bias"),
        "2": ("2.weight", "2.bias"),
    }


@pytest.mark.parametrize(
    ("model", "inputs", "error", "message"),
    [
        (3, IMAGES, TypeError, r"model: expected an nn\.Module, got int"),
        (nn.Linear, IMAGES, TypeError, r"model: expected an nn\.Module, got type"),
        (nn.Linear(2, 2), None, TypeError, "inputs: expected a Tensor, got NoneType"),
        (nn.Linear(2, 2), torch.ones(0, 2), ValueError, r"inputs: shape \[0, 2\] has no sample"),
        (nn.LazyLinear(2), torch.ones(2, 2), ValueError, "model: 'weight' has no shape yet"),
    ],
)
def test_sets_of_wrong_arguments(model, inputs, error, message) -> None:
    with pytest.raises(error, match=message):
        homogeneous_sets(model, inputs)


def test_outputs_without_a_graph() -> None:
    class Cut(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    with pytest.raises(ValueError, match="model: its outputs have no graph"):
        parameter_gradient_bounds(Cut(2, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.long))


def test_pictures(tmp_path: Path) -> None:
    model = residual_network()
    layer_norms(model, IMAGES).save(tmp_path / "norms.png", title="norms")
    activation_gradient_bounds(model, IMAGES, TARGETS).save(tmp_path / "activations.png")
    parameter_gradient_bounds(model, IMAGES, TARGETS).save(tmp_path / "parameters.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("norms", "activations", "parameters"))


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        ({"a": []}, ValueError, "sets: 'a' names no parameter; give at least one"),
        ({}, ValueError, "sets: is empty"),
        ({"a": "weight"}, TypeError, "sets: 'a' must be a sequence of parameters' names, not 'weight'"),
        ({"a": 3}, TypeError, "sets: 'a' must be a sequence of parameters' names, not 3"),
        (["weight"], TypeError, "sets: expected a mapping from names to parameters' names, got list"),
    ],
)
def test_sets_have_parameters(sets, error, message) -> None:
    with pytest.raises(error, match=message):
        parameter_gradient_bounds(nn.Linear(2, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.long), sets=sets)
