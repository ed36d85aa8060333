"""Singular values of Jacobians, against Jacobians written out by autograd and against known matrices."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import gaussian
from torch import Tensor, nn

import wnfused
from wnfused.diagnostics import jacobian_growth, jacobian_spectrum, layer_jacobians
from wnfused.diagnostics.lanczos import largest_singular_values

pytestmark = pytest.mark.usefixtures("on_the_reference")


IMAGES = gaussian(3, 2, 4, 4)


class Small(nn.Module):
    def __init__(self, outputs: int = 5) -> None:
        super().__init__()
        self.stem = wnfused.WNConv2d(2, 3, 3, padding=1, activation="relu")
        self.stage = wnfused.WNResidualStage(3, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(48, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.norm(self.stage(self.stem(x)))).flatten(1))


def small(outputs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return Small(outputs).double().eval()


def by_autograd(function, x: Tensor) -> Tensor:
    """J of one sample."""
    j = torch.autograd.functional.jacobian(lambda x: function(x[None])[0].flatten(), x)
    return j.reshape(j.shape[0], -1)


@pytest.mark.parametrize("outputs", [5, 40])
def test_the_whole_network(outputs: int) -> None:
    model = small(outputs)
    found = jacobian_spectrum(model, IMAGES)
    assert (found.exact, found.inputs, found.outputs) == (True, 32, outputs)
    for i, x in enumerate(IMAGES):
        j = by_autograd(model, x)
        values = torch.linalg.svdvals(j)
        assert found.singular_values[i] == pytest.approx(values.numpy(), rel=1e-9, abs=1e-12)
        eigenvalues = torch.linalg.eigvalsh(j @ j.T)
        assert found.mean[i] == pytest.approx(eigenvalues.mean().item(), rel=1e-9)
        assert found.variance[i] == pytest.approx(eigenvalues.var(correction=0).item(), rel=1e-9)


@pytest.mark.parametrize("outputs", [5, 40])
def test_lanczos_finds_the_largest_and_probes_the_moments(outputs: int) -> None:
    model = small(outputs)
    exact = jacobian_spectrum(model, IMAGES)
    found = jacobian_spectrum(model, IMAGES, method="lanczos", count=4, probes=400)
    assert not found.exact
    assert found.singular_values == pytest.approx(exact.singular_values[:, :4], rel=1e-6)
    # Hutchinson's variance with signs is below 2 ||A||_F^2 / probes; the factor 4 is four standard deviations.
    scatter = 4 * np.sqrt(2 * (exact.singular_values**4).sum(1) / 400) / outputs
    assert (np.abs(found.mean - exact.mean) <= scatter).all()
    assert found.variance == pytest.approx(exact.variance, rel=0.6)


def test_a_part_of_the_network() -> None:
    model = small()
    found = jacobian_spectrum(model, IMAGES, start="stem", end="stage")
    h = model.stem(IMAGES).detach()
    for i in range(3):
        values = torch.linalg.svdvals(by_autograd(model.stage, h[i]))
        assert found.singular_values[i] == pytest.approx(values.numpy(), rel=1e-9)
    assert jacobian_spectrum(model, IMAGES, start="act").outputs == 5


def test_every_layer_s_own() -> None:
    model = small()
    found = layer_jacobians(model, IMAGES)
    assert found.names == ("stem", "stage.blocks.0", "stage.blocks.1", "norm", "head")
    h = model.stem(IMAGES).detach()
    first, second = model.stage.blocks()
    for station, function, x in ((0, model.stem, IMAGES), (1, first, h), (2, second, first(h).detach())):
        values = torch.stack([torch.linalg.svdvals(by_autograd(function, sample)) for sample in x])
        assert found.largest[station] == pytest.approx(values[:, 0].mean().item(), rel=1e-9)
        assert found.smallest[station] == pytest.approx(values[:, -1].mean().item(), rel=1e-8, abs=1e-10)
        assert found.mean[station] == pytest.approx((values**2).sum(1).mean().item() / 48, rel=1e-9)
    rough = layer_jacobians(model, IMAGES, method="lanczos", probes=100)
    assert rough.largest == pytest.approx(found.largest, rel=5e-3)
    assert np.isnan(rough.smallest).all()
    assert rough.mean == pytest.approx(found.mean, rel=0.2)


@pytest.mark.parametrize("method", ["exact", "lanczos"])
def test_what_follows_the_end_may_write_in_place(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4)).double()
    found = jacobian_spectrum(model, gaussian(3, 6), end="0", method=method, count=5).singular_values
    assert found == pytest.approx(np.tile(torch.linalg.svdvals(model[0].weight.detach()), (3, 1)), rel=1e-6)


@pytest.mark.parametrize("kind", [nn.SiLU, nn.ELU, nn.Hardswish])
def test_a_station_that_writes_its_input_in_place(kind: type[nn.Module]) -> None:
    x = gaussian(3, 6)
    found, expected = (
        layer_jacobians(nn.Sequential(nn.Identity(), kind(inplace=inplace)), x, filter=lambda name, _: name == "1")
        for inplace in (True, False)
    )
    assert found.largest == pytest.approx(expected.largest, rel=1e-12)
    assert found.mean == pytest.approx(expected.mean, rel=1e-12)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(x)))


@pytest.mark.parametrize("argument", ["start", "end"])
def test_an_end_that_is_called_twice_is_named(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}: 'shared' is called more than once; name a module that is"):
        jacobian_spectrum(Twice(), torch.randn(3, 4), **{argument: "shared"})


@pytest.mark.parametrize("method", ["exact", "lanczos"])
def test_samples_of_nan_have_no_jacobian(method: str) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), torch.randn(3, 6)
    x[1, 2] = math.nan
    found = jacobian_spectrum(model, x, method=method)
    for values in (found.singular_values[:, 0], found.mean, found.variance):
        assert np.isnan(values).tolist() == [False, True, False]
    assert np.isnan(layer_jacobians(model, x, method=method).largest).all()
    assert np.isnan(jacobian_growth(model, x).growth).all()


def test_growth_is_the_mean_eigenvalue_up_to_each_layer() -> None:
    model = small()
    found = jacobian_growth(model, IMAGES, probes=100)
    assert found.names == ("stem", "stage.blocks.0", "stage.blocks.1", "norm", "head")
    for station, end in ((0, "stem"), (2, "stage"), (4, None)):
        exact = jacobian_spectrum(model, IMAGES, end=end).mean.mean()
        assert found.growth[station] == pytest.approx(exact, rel=4 * found.spread[station] / exact / 300**0.5)


def test_orthogonal_layers_are_isometries() -> None:
    layers = [nn.Linear(12, 12, bias=False) for _ in range(20)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.linalg.qr(layer.weight).Q)
    x = gaussian(2, 12)
    assert jacobian_spectrum(model, x).singular_values == pytest.approx(1, rel=1e-12)
    # The Krylov space is exhausted after one step.
    for count in (1, 10):
        found = jacobian_spectrum(model, x, method="lanczos", count=count).singular_values
        assert found == pytest.approx(np.ones((2, count)), rel=1e-12)
    assert jacobian_growth(model, x).growth == pytest.approx(1, rel=1e-12)
    assert layer_jacobians(model, x).largest == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("shape", [(30, 20), (30, 30), (50, 6)])
def test_lanczos_on_known_matrices(shape: tuple[int, int]) -> None:
    a = gaussian(2, *shape)
    found = largest_singular_values(
        lambda v: (a @ v[..., None])[..., 0], lambda u: (a.mT @ u[..., None])[..., 0], gaussian(2, shape[1], seed=1), 5,
        tolerance=1e-12,
    )  # fmt: skip
    assert torch.allclose(found, torch.linalg.svdvals(a)[:, :5], rtol=1e-8)


@pytest.mark.parametrize(
    "a",
    [
        torch.diag(torch.tensor([3.0, 3.0, 2.0, 0.0, 0.0], dtype=torch.float64)),
        torch.block_diag(*[gaussian(5, 5)] * 10),
        torch.ones(15, 12, dtype=torch.float64),
        torch.zeros(6, 5, dtype=torch.float64),
        torch.full((6, 5), math.nan, dtype=torch.float64),
    ],
    ids=["diagonal", "ten copies", "rank 1", "zero", "nan"],
)
def test_lanczos_with_equal_and_missing_singular_values(a: Tensor) -> None:
    """A Krylov space holds one direction of each: what is exhausted begins anew."""
    expected = torch.full((5,), math.nan) if a.isnan().any() else torch.linalg.svdvals(a)[:5]
    found = largest_singular_values(lambda v: v @ a.T, lambda u: u @ a, gaussian(1, a.shape[1], seed=1), 5)
    assert found[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6, nan_ok=True)


def test_nothing_is_left_behind() -> None:
    model = small()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    seen: list[int] = []
    jacobian_spectrum(model, IMAGES, start="stem", progress=lambda done, total: seen.append(done))
    assert seen == [1, 2, 3, 4, 5]
    layer_jacobians(model, IMAGES)
    jacobian_growth(model, IMAGES)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())


def test_an_exploding_network_gives_nan_not_an_error() -> None:
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, float("inf"))
    assert np.isnan(jacobian_spectrum(model, torch.ones(1, 3)).singular_values).all()


def test_pictures(tmp_path: Path) -> None:
    model = small()
    jacobian_spectrum(model, IMAGES).save(tmp_path / "whole.png")
    layer_jacobians(model, IMAGES).save(tmp_path / "layers.png")
    jacobian_growth(model, IMAGES).save(tmp_path / "growth.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("whole", "layers", "growth"))


def test_wrong_arguments() -> None:
    model = small()
    with pytest.raises(ValueError, match="start: the model has no module 'x'"):
        jacobian_spectrum(model, IMAGES, start="x")
    with pytest.raises(ValueError, match=r"end: the model has no module \['x'\]"):
        jacobian_spectrum(model, IMAGES, end=["x"])
    with pytest.raises(ValueError, match="end: the output of 'stem' does not depend on 'head'"):
        jacobian_spectrum(model, IMAGES, start="head", end="stem")
    with pytest.raises(ValueError, match="method: unknown 'fast'"):
        jacobian_spectrum(model, IMAGES, method="fast")
    with pytest.raises(ValueError, match="count: 0"):
        jacobian_spectrum(model, IMAGES, count=0)
    with pytest.raises(TypeError, match=r"inputs: torch\.int64 has no derivatives"):
        jacobian_growth(nn.Embedding(3, 3), torch.tensor([[1]]))
    with pytest.raises(TypeError, match="name a module as start"):
        jacobian_spectrum(nn.Embedding(3, 3), torch.tensor([[1]]))
    untracked = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)).eval()
    for measure in (jacobian_spectrum, layer_jacobians, jacobian_growth):
        with pytest.raises(ValueError, match="model: batch norm '0' keeps no statistics"):
            measure(untracked, IMAGES)
        with pytest.raises(ValueError, match="model: batch norm 'norm' is in train mode"):
            measure(model.train(), IMAGES)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


def test_what_is_not_one_for_each_sample_is_named() -> None:
    folded = nn.Sequential(nn.Linear(2, 12), nn.Unflatten(1, (2, 6)), nn.Flatten(0, 1))
    with pytest.raises(ValueError, match=r"end: the output of 'the model', \[8, 6\], is not one for each of 4 samples"):
        jacobian_spectrum(folded, torch.randn(4, 2))
    with pytest.raises(ValueError, match=r"start: the output of '2', \[8, 6\], is not one"):
        jacobian_spectrum(nn.Sequential(*folded, nn.Linear(6, 3)), torch.randn(4, 2), start="2")
    with pytest.raises(ValueError, match="start: 'rnn' was not called, or its output is no floating-point tensor"):
        jacobian_spectrum(Recurrent(), torch.randn(5, 2, 3), start="rnn")
    with pytest.raises(ValueError, match=r"filter: the output of 'head', \[2, 2\], is not one for each of 5 samples"):
        layer_jacobians(Recurrent(), torch.randn(5, 2, 3), filter=lambda name, module: name == "head")
    with pytest.raises(ValueError, match=r"filter: the input of '3', \[8, 6\], is not one for each of 4 samples"):
        layer_jacobians(
            nn.Sequential(*folded, nn.Unflatten(0, (4, 2))), torch.randn(4, 2), filter=lambda name, module: name == "3"
        )
