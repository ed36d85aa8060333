"""Power iteration on the Hessian, against the eigenvalues of the full matrix in float64."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wnfused
from wnfused.diagnostics import HessianNorm, hessian_norm
from wnfused.optional import MissingDependencyError

IMAGES = torch.randn(10, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = torch.arange(10) % 3


pytestmark = pytest.mark.usefixtures("on_the_reference")


def normalised(v: Tensor, g: Tensor) -> Tensor:
    """Weight normalisation as autograd differentiates it."""
    shape = [-1] + [1] * (v.dim() - 1)
    return v * (g.reshape(-1) / v.flatten(1).norm(dim=1)).reshape(shape)


def plain() -> tuple[nn.Module, Callable[[dict[str, Tensor], Tensor], Tensor]]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return model, lambda p, x: torch.func.functional_call(model, p, x)


def weight_normalised() -> tuple[nn.Module, Callable[[dict[str, Tensor], Tensor], Tensor]]:
    model = nn.Sequential(nn.Flatten(), wnfused.WNLinear(18, 3, activation="relu"), nn.Linear(3, 3)).double()

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.linear(x.flatten(1), normalised(p["1.weight_v"], p["1.weight_g"]), p["1.bias"]).relu()
        return F.linear(h, p["2.weight"], p["2.bias"])

    return model, function


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = wnfused.WNResidualStage(2, 2, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage(x).mean((2, 3)))


def staged() -> tuple[nn.Module, Callable[[dict[str, Tensor], Tensor], Tensor]]:
    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        v, g, b = (p[f"stage.{name}"] for name in ("weight_v", "weight_g", "bias"))
        for i in range(2):
            a = F.conv2d(x, normalised(v[i, 0], g[i, 0]), b[i, 0], padding=1).relu()
            x = x + F.conv2d(a, normalised(v[i, 1], g[i, 1]), b[i, 1], padding=1)
        return F.linear(x.mean((2, 3)), p["head.weight"], p["head.bias"])

    return Staged().double(), function


def eigenvalues(model: nn.Module, function: Callable[[dict[str, Tensor], Tensor], Tensor]) -> Tensor:
    """Of the Hessian of the mean cross-entropy, column by column."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([math.prod(shape) for shape in shapes.values()])
        p = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(function(p, IMAGES), TARGETS)

    hessian = torch.autograd.functional.hessian(loss, flat)
    assert torch.allclose(hessian, hessian.T, rtol=0, atol=1e-12)
    return torch.linalg.eigvalsh(hessian)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("case", [plain, weight_normalised, staged])
def test_the_norm_is_the_largest_eigenvalue(case: Callable, batch_size: int | None) -> None:
    model, function = case()
    with torch.no_grad():  # off the symmetric start, where biases are 0
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.1)
    found = eigenvalues(model, function)
    # A change below t of the estimate leaves an error of about t / (1 - ratio^2); the ratios here are below 0.99.
    measured = hessian_norm(model, IMAGES, TARGETS, batch_size=batch_size, tolerance=1e-8, max_iterations=3000)
    assert measured.converged
    assert measured.norm == pytest.approx(found.abs().max().item(), rel=1e-6)
    assert abs(measured.eigenvalue) == pytest.approx(measured.norm, rel=1e-6)
    assert (found - measured.eigenvalue).abs().min() <= measured.residual + 1e-12
    assert (np.diff(measured.estimates) >= -1e-12 * measured.norm).all()
    assert measured.samples == 10
    assert measured.parameters == sum(p.numel() for p in model.parameters())


def test_a_quadratic_whose_largest_eigenvalue_is_negative() -> None:
    curvature = torch.tensor([1.0, -3.0, 2.0, 0.0], dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 5 * (model.weight.square() @ curvature).sum() / 2

    measured = hessian_norm(model, torch.ones(5, 4, dtype=torch.float64), TARGETS[:5], loss=loss, tolerance=1e-12)
    assert measured.norm == pytest.approx(3, rel=1e-9)
    assert measured.eigenvalue == pytest.approx(-3, rel=1e-9)


def test_the_first_samples_and_single_precision() -> None:
    model, _ = staged()
    first = hessian_norm(model, IMAGES, TARGETS, samples=6, batch_size=4)
    assert first.norm == hessian_norm(model, IMAGES[:6], TARGETS[:6], batch_size=4).norm
    single = hessian_norm(copy.deepcopy(model).float(), IMAGES.float(), TARGETS, samples=6)
    assert single.norm == pytest.approx(first.norm, rel=1e-4)


def test_batch_norm_uses_the_statistics_of_all_samples_and_keeps_its_own() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)).double()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = eigenvalues(model, lambda p, x: torch.func.functional_call(copy.deepcopy(model), p, x))
    together = hessian_norm(model, IMAGES, TARGETS, batch_size=None, tolerance=1e-9)
    assert together.norm == pytest.approx(found.abs().max().item(), rel=1e-6)
    apart = hessian_norm(model, IMAGES, TARGETS, batch_size=4, tolerance=1e-9)
    assert abs(apart.norm - together.norm) > 1e-3 * together.norm
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_dropout_is_one_function_and_torch_s_random_state_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed_all(seed: int) -> None:
        raise AssertionError("the model is on no GPU, whose generators are not put back")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed_all)
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    state = torch.get_rng_state()
    measured = hessian_norm(model, IMAGES, TARGETS, batch_size=4, tolerance=1e-8)
    assert torch.equal(torch.get_rng_state(), state)
    assert measured.converged
    assert (np.diff(measured.estimates) >= -1e-12).all()


def test_some_parameters() -> None:
    model, function = plain()
    head = list(model[3].parameters())
    measured = hessian_norm(model, IMAGES, TARGETS, parameters=head, tolerance=1e-9)
    model[1].requires_grad_(False)
    assert hessian_norm(model, IMAGES, TARGETS, tolerance=1e-9).norm == measured.norm
    everything = eigenvalues(model, function).abs().max().item()
    assert measured.norm <= everything
    assert measured.parameters == 12


def test_a_loss_without_curvature_and_one_that_overflows() -> None:
    model = nn.Linear(4, 1).double()
    x = torch.ones(3, 4, dtype=torch.float64)
    flat = hessian_norm(model, x, TARGETS[:3], loss=lambda outputs, targets: outputs.sum())
    assert (flat.norm, flat.converged, flat.iterations) == (0.0, True, 1)
    steep = hessian_norm(model, x, TARGETS[:3], loss=lambda outputs, targets: (1e200 * outputs).pow(2).sum())
    assert not steep.converged
    assert not math.isfinite(steep.norm)


def test_it_says_that_it_did_not_converge_and_reports_progress() -> None:
    model, _ = plain()
    seen: list[tuple[int, int | None]] = []
    measured = hessian_norm(
        model, IMAGES, TARGETS, max_iterations=3, tolerance=1e-12, progress=lambda *step: seen.append(step)
    )
    assert not measured.converged
    assert seen == [(1, None), (2, None), (3, None)]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_torch_s_weight_norm_has_right_second_derivatives(old: bool, dim: int | None) -> None:
    weight_norm = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    weight_norm(model[1], dim=dim)
    gain, direction = ("weight_g", "weight_v") if old else (f"parametrizations.weight.original{i}" for i in (0, 1))

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        g, v = p[f"1.{gain}"], p[f"1.{direction}"]
        norm = v.norm() if dim is None else v.norm(dim=1 - dim, keepdim=True)
        return F.linear(F.linear(x.flatten(1), v * g / norm, p["1.bias"]).tanh(), p["3.weight"], p["3.bias"])

    found = eigenvalues(model, function).abs().max().item()
    assert hessian_norm(model, IMAGES, TARGETS, tolerance=1e-9).norm == pytest.approx(found, rel=1e-6)
    steps = [*model[1]._forward_pre_hooks.values()] if old else [*model[1].parametrizations.weight]
    assert not any("forward" in step.__dict__ or "compute_weight" in step.__dict__ for step in steps)


def test_two_generators_find_the_same_norm() -> None:
    model, _ = plain()
    norms = [
        hessian_norm(model, IMAGES, TARGETS, tolerance=1e-10, generator=torch.Generator().manual_seed(seed)).norm
        for seed in (1, 2)
    ]
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_picture_and_json(tmp_path: Path) -> None:
    measured = hessian_norm(plain()[0], IMAGES, TARGETS)
    measured.save(tmp_path / "new" / "hessian.png", title="two layers")
    assert (tmp_path / "new" / "hessian.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"path: '.*hessian.txt' is no name of a picture; end it in .png"):
        measured.save(tmp_path / "hessian.txt")
    plain_types = measured.as_json()
    assert plain_types["norm"] == measured.norm
    assert plain_types["estimates"] == measured.estimates.tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("estimates", [[math.nan], [1.0, math.inf], [0.0]])
def test_pictures_of_what_no_logarithm_shows(tmp_path: Path, estimates: list[float]) -> None:
    HessianNorm(estimates[-1], 0.0, 0.0, False, np.array(estimates), 4, 5).save(tmp_path / "hessian.png")
    assert (tmp_path / "hessian.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = hessian_norm(plain()[0], IMAGES, TARGETS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"drawing needs matplotlib.*pip install --no-build-isolation"):
        measured.draw()
    with pytest.raises(MissingDependencyError, match="matplotlib"):
        measured.save(tmp_path / "hessian.png")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"inputs": IMAGES[:0]}, r"inputs: shape \[0, 2, 3, 3\] has no sample"),
        ({"targets": TARGETS[:3]}, r"targets: shape \[3\] does not fit 10 samples"),
        ({"samples": 0}, "samples: 0 must be an int of at least 1"),
        ({"batch_size": 0.5}, "batch_size: 0.5 must be an int"),
        ({"max_iterations": 0}, "max_iterations: 0"),
        ({"tolerance": 0}, "tolerance: 0 must be above 0 and below 1"),
        ({"parameters": []}, "parameters: none asks for a gradient"),
        ({"parameters": [torch.zeros(1)]}, "parameters: all must have requires_grad=True"),
        ({"loss": lambda outputs, targets: outputs.detach().sum()}, "loss: what it returns has no graph"),
        ({"loss": lambda outputs, targets: outputs}, "loss: must return the sum over the samples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(arguments: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hessian_norm(**{"model": plain()[0], "inputs": IMAGES, "targets": TARGETS, **arguments})


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got int"):
        hessian_norm(3, IMAGES, TARGETS)
    with pytest.raises(TypeError, match="inputs: expected a Tensor, got list"):
        hessian_norm(plain()[0], [1], TARGETS)
    with pytest.raises(TypeError, match="targets: expected a Tensor, got int"):
        hessian_norm(plain()[0], IMAGES, 3)
    with pytest.raises(TypeError, match="tolerance: expected a number, got str"):
        hessian_norm(plain()[0], IMAGES, TARGETS, tolerance="x")
    for parameters, culprit in (["a"], "'a'"), (3, "3"):
        with pytest.raises(TypeError, match=f"parameters: expected tensors, got {culprit}"):
            hessian_norm(plain()[0], IMAGES, TARGETS, parameters=parameters)


def test_modules_that_share_a_hook_of_the_old_weight_norm():
    first = nn.utils.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(first, nn.Tanh(), copy.copy(first))
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    assert hessian_norm(model, x, y, max_iterations=2).norm > 0
    assert all("compute_weight" not in vars(hook) for hook in first._forward_pre_hooks.values())
