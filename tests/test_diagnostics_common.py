"""What all measurements share: they keep no activation longer than the network does, and show progress when asked."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wnfused.diagnostics import (
    activation_gradient_bounds,
    hessian_norm,
    jacobian_growth,
    jacobian_spectrum,
    layer_jacobians,
    layer_norms,
    orthogonality,
    parameter_gradient_bounds,
    similarity,
)  # fmt: skip
from wnfused.diagnostics.progress import advancing
from wnfused.diagnostics.stations import Call, observed
from wnfused.nn import WNResidualStage
from wnfused.optional import MissingDependencyError

pytestmark = pytest.mark.usefixtures("on_the_reference")


class Remembering(nn.Linear):
    """Keeps weak references to its outputs, which die with their last user."""

    seen: list[weakref.ref[Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(output() is not None for output in self.seen))
        y = super().forward(x)
        self.seen.append(weakref.ref(y))
        return y


@pytest.mark.parametrize("measure", [orthogonality, similarity, jacobian_growth, layer_jacobians])
def test_memory_does_not_grow_with_depth(measure: Callable) -> None:
    """When a layer begins, of all outputs before it only its input, and in Sequential's hands one more, may live."""
    layers = [Remembering(5, 5) for _ in range(12)]
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for layer in layers:
        layer.seen, layer.alive = seen, alive
    measure(nn.Sequential(*layers), torch.randn(3, 5))
    assert max(alive) <= 2, alive


def test_one_measurement_inside_another_sees_its_own_calls_alone() -> None:
    """An observer may run the station again: nothing inside is a call of the network's."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    names: list[str] = []

    def observe(call: Call) -> None:
        names.append(call.name)
        torch.testing.assert_close(call.run(call.input), call.output)

    with observed(model, observe, filter=lambda name, module: name in ("0", "1", "1.0")):
        model(torch.randn(2, 3))
    assert names == ["0", "1.0", "1"]


class Halving(WNResidualStage):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("kind", [WNResidualStage, Halving])
def test_a_stage_with_a_forward_of_its_own_is_observed_whole(kind: type[WNResidualStage]) -> None:
    stage, x = kind(2, 4, 3), torch.randn(2, 2, 5, 5)
    expected = stage(x)
    if kind is WNResidualStage:
        plain, expected = stage.forward, expected / 2
        stage.forward = lambda x: plain(x) / 2  # type: ignore[method-assign]
    patch = stage.__dict__.get("forward")
    calls: list[Call] = []
    with observed(nn.Sequential(stage), calls.append), torch.no_grad():
        stage(x)
    assert [call.name for call in calls] == ["0"]
    torch.testing.assert_close(calls[0].output, expected)
    assert stage.__dict__.get("forward") is patch


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(input=self.first(input=x).relu())


@pytest.mark.parametrize("as_given", [False, True])
def test_inputs_by_keyword(as_given: bool) -> None:
    names: list[str] = []

    def observe(call: Call) -> None:
        names.append(call.name)
        torch.testing.assert_close(call.run(call.input), call.output)

    model = ByKeyword()
    with observed(model, observe, as_given=as_given):
        model(torch.randn(2, 3))
    assert names == ["first", "second"]


def test_measurements_of_one_stage_nest() -> None:
    stage, x, names = WNResidualStage(4, 4, 2), torch.randn(2, 4, 5, 5), []
    model = nn.Sequential(stage)
    with observed(model, lambda call: names.append(f"outer {call.name}")):
        with observed(model, lambda call: names.append(f"inner {call.name}")):
            model(x)
        model(x)
    assert names == [f"{which} 0.blocks.{i}" for which in ("inner", "outer") for i in (0, 1)]
    assert "forward" not in stage.__dict__


def test_a_replacement_flows_on() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with observed(model, lambda call: torch.zeros_like(call.output) if call.name == "0" else None):
        assert torch.equal(model(torch.randn(1, 3))[0], model[1].bias)


def test_progress_on_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    quiet = layer_norms(model, x)
    assert capsys.readouterr().out == ""
    loud = layer_norms(model, x, progress=True)
    assert list(loud) == list(quiet)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(MissingDependencyError, match="progress bar needs rich"):
        orthogonality(model, x, progress=True)


def test_progress_of_the_caller() -> None:
    seen: list[tuple[int, int | None]] = []
    with advancing(lambda *step: seen.append(step), "steps", 3) as advance:
        advance()
        advance()
    assert seen == [(1, 3), (2, 3)]


def test_flags_of_parameters_survive_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'2.weight' has no shape yet"):
        layer_norms(model, torch.ones(2, 4))
    assert model[0].weight.requires_grad
    frozen = nn.Sequential(nn.Linear(4, 3)).requires_grad_(False)
    with pytest.raises(ValueError, match="targets: 7 is none of"):
        parameter_gradient_bounds(frozen, torch.ones(2, 4), torch.tensor([0, 7]))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_bounds_of_a_model_with_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    bounds = parameter_gradient_bounds(model, torch.randn(6, 4), torch.arange(6) % 3)
    assert bounds.names[:2] == ("0", "3")


class Windows(nn.Module):
    """Folds windows into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(3, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inside(x.reshape(-1, 3)).reshape(len(x), -1))


@pytest.mark.parametrize("measure", [orthogonality, similarity, jacobian_growth, layer_norms])
def test_stations_that_are_not_by_sample_are_named(measure: Callable) -> None:
    model, x = Windows(), torch.randn(5, 12)
    with pytest.raises(
        ValueError, match=r"filter: the output of 'inside', \[20, 3\], is not one for each of 5 samples"
    ):
        measure(model, x)
    assert len(measure(model, x, filter=lambda name, module: name == "head").names) == 1


@pytest.mark.parametrize("measure", [hessian_norm, jacobian_growth, layer_jacobians])
def test_a_wrong_generator_is_named(measure: Callable) -> None:
    targets = (torch.zeros(2, dtype=torch.long),) if measure is hessian_norm else ()
    with pytest.raises(TypeError, match="generator: 3 must be"):
        measure(nn.Linear(4, 3), torch.ones(2, 4), *targets, generator=3)


def test_one_tensor_is_not_several_parameters() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(TypeError, match=r"parameters: expected several tensors"):
        hessian_norm(model, torch.ones(2, 4), torch.zeros(2, dtype=torch.long), parameters=model.weight)


def test_a_picture_of_no_station(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    orthogonality(nn.Sequential(nn.ReLU()), torch.ones(2, 4)).save(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


TARGETS = torch.tensor([0, 1, 2, 0])
MEASUREMENTS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "layer_norms": lambda model, x: layer_norms(model, x, TARGETS).gradients,
    "hessian_norm": lambda model, x: hessian_norm(model, x, TARGETS, batch_size=2, max_iterations=3).norm,
    "jacobian_spectrum": lambda model, x: jacobian_spectrum(model, x).singular_values,
    "layer_jacobians": lambda model, x: layer_jacobians(model, x).mean,
    "jacobian_growth": lambda model, x: jacobian_growth(model, x).growth,
    "orthogonality": lambda model, x: orthogonality(model, x).gap,
    "similarity": lambda model, x: similarity(model, x).cosine,
    "activation_gradient_bounds": lambda model, x: activation_gradient_bounds(model, x, TARGETS).bounds,
    "parameter_gradient_bounds": lambda model, x: parameter_gradient_bounds(model, x, TARGETS).gradient,
}
DERIVATIVES = sorted(MEASUREMENTS.keys() - {"orthogonality", "similarity"})


class Halved(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) if self.inplace else x * 0.5


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_model_may_write_its_inputs(name: str) -> None:
    layers = nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    x = torch.randn(4, 5)
    before = x.clone()
    found, expected = (MEASUREMENTS[name](nn.Sequential(Halved(inplace), *layers), x) for inplace in (True, False))
    assert found == pytest.approx(expected, rel=1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("name", "train"),
    [(name, train) for name in MEASUREMENTS for train in (False, True) if not (train and "jacobian" in name)],
)
def test_a_graph_that_the_caller_holds_survives(name: str, train: bool) -> None:
    model, x = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).train(train), torch.randn(4, 5)
    loss = F.cross_entropy(model(x), TARGETS)
    expected = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
    MEASUREMENTS[name](model, x)
    assert torch.equal(torch.autograd.grad(loss, model[0].weight)[0], expected)


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_the_weight_of_the_old_weight_norm_stays(name: str) -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(5, 3)))
    weight = model[0].weight
    MEASUREMENTS[name](model, torch.randn(4, 5))
    assert model[0].weight is weight
    assert weight.requires_grad


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_inputs_without_numbers_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="inputs: is a meta tensor, without numbers; use one on the model's device"):
        MEASUREMENTS[name](nn.Linear(5, 3), torch.empty(4, 5, device="meta"))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_inference_mode_has_no_derivatives(name: str) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch\.inference_mode: nothing can be"):
        MEASUREMENTS[name](nn.Linear(5, 3), torch.randn(4, 5))


class Score(nn.Module):
    """One number a sample, scaled by a parameter of the model's own, which makes the model a station."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 1), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x).squeeze(-1)


@pytest.mark.parametrize("name", ["orthogonality", "similarity", "jacobian_growth"])
def test_outputs_of_one_number_a_sample(name: str) -> None:
    found = MEASUREMENTS[name](Score(), torch.randn(4, 5))
    assert len(found) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("name", [*MEASUREMENTS, "lanczos"])
def test_a_default_device_is_for_the_users_own_tensors(name: str) -> None:
    measure = MEASUREMENTS.get(name, lambda model, x: jacobian_spectrum(model, x, method="lanczos").singular_values)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(4, 5)
    torch.manual_seed(0)
    expected = measure(model, x)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = measure(model, x)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", [*MEASUREMENTS, "lanczos"])
def test_compiled_models_are_measured_as_written(name: str, whole: bool) -> None:
    """What a backend compiled ahead of time has no second derivative, and runs no hooks."""
    measure = MEASUREMENTS.get(name, lambda model, x: jacobian_spectrum(model, x, method="lanczos").singular_values)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(4, 5)
    torch.manual_seed(0)
    expected = measure(model, x)
    try:
        compiled = torch.compile(model, backend="aot_eager") if whole else model
        if not whole:
            model[0].compile(backend="aot_eager")
        compiled(x)
        torch.manual_seed(0)
        assert measure(compiled, x) == pytest.approx(expected, rel=1e-5)
    finally:
        torch._dynamo.reset()


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


@pytest.mark.parametrize("measure", [layer_norms, hessian_norm, activation_gradient_bounds, parameter_gradient_bounds])
def test_wrong_outputs_and_losses_are_named(measure: Callable) -> None:
    x = torch.randn(4, 5)
    with pytest.raises(TypeError, match=r"model: expected logits \[n, classes\] for the cross-entropy, got tuple"):
        measure(Pair(5, 3), x, TARGETS)
    if measure not in (layer_norms, hessian_norm):
        return
    with pytest.raises(ValueError, match=r"loss: must return the sum over the samples, not a tensor of shape \[4, 3\]"):
        measure(nn.Linear(5, 3), x, TARGETS, loss=lambda outputs, targets: outputs)
    with pytest.raises(TypeError, match="loss: must return a Tensor, not float"):
        measure(nn.Linear(5, 3), x, TARGETS, loss=lambda outputs, targets: outputs.sum().item())
    if measure is layer_norms:
        with pytest.raises(TypeError, match=r"model: expected logits .* got a tensor of shape \[15\]"):
            measure(nn.Sequential(nn.Linear(5, 3), nn.Flatten(0)), torch.randn(5, 5))


LOSSES = (layer_norms, hessian_norm, activation_gradient_bounds, parameter_gradient_bounds)
OF_CLASSES = LOSSES[2:]


@pytest.mark.parametrize("measure", LOSSES)
@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (TARGETS + 1, ValueError, "targets: 3 is none of the model's 3 classes, 0 to 2"),
        (TARGETS - 1, ValueError, "targets: -1 is none of the model's 3 classes, 0 to 2"),
        (TARGETS.int(), TypeError, r"targets: expected classes in int64, got torch\.int32"),
        (TARGETS.bool(), TypeError, r"targets: expected classes in int64, got torch\.bool"),
        (TARGETS[:, None], ValueError, r"targets: shape \[4, 1\] does not fit; use \[4\]"),
        (TARGETS[:2], ValueError, r"targets: shape \[2\] does not fit 4 samples"),
        ([0, 1, 2, 0], TypeError, "targets: expected a Tensor, got list"),
        (TARGETS.to("meta"), ValueError, "targets: are on meta, the model's outputs on cpu; use one device"),
    ],
)
def test_wrong_targets_are_named(measure: Callable, targets: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(nn.Linear(5, 3), torch.randn(4, 5), targets)


@pytest.mark.parametrize("measure", LOSSES)
def test_targets_that_are_no_classes(measure: Callable) -> None:
    """Probabilities, bytes and torch's mark of no class are the cross-entropy's; the bounds speak of classes."""
    x, model = torch.randn(4, 5), nn.Linear(5, 3)
    if measure not in OF_CLASSES:
        for targets in (torch.full((4, 3), 1 / 3), TARGETS.to(torch.uint8), torch.full((4,), -100)):
            measure(model, x, targets)
        with pytest.raises(ValueError, match=r"targets: torch\.float32 of shape \[4\] are no probabilities of shape"):
            measure(model, x, TARGETS.float())
        return
    for targets in (torch.full((4, 3), 1 / 3), TARGETS.to(torch.uint8)):
        with pytest.raises(TypeError, match=f"targets: expected classes in int64, got {targets.dtype}"):
            measure(model, x, targets)
    with pytest.raises(ValueError, match="targets: -100 is none of the model's 3 classes"):
        measure(model, x, torch.full((4,), -100))
    with pytest.raises(ValueError, match=r"model: the bounds are for logits \[n, classes\], not for shape \[4, 3, 2\]"):
        measure(nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (3, 2))), x, TARGETS)


def test_a_wrong_progress_is_named() -> None:
    with pytest.raises(TypeError, match="progress: 'x' must be True, False or a function"):
        similarity(nn.Linear(5, 3), torch.randn(4, 5), progress="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "ax", "message"),
    [
        (lambda: layer_norms(nn.Linear(5, 3), torch.randn(4, 5)), 3, "ax: expected a sequence of 2 axes, got int"),
        (lambda: layer_norms(nn.Linear(5, 3), torch.randn(4, 5)), "ab", "ax: expected matplotlib's axes, got str"),
        (lambda: similarity(nn.Linear(5, 3), torch.randn(4, 5)), 3, "ax: expected matplotlib's axes, got int"),
    ],
)
def test_what_is_no_axes_is_named(measured: Callable, ax: object, message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(TypeError, match=message):
        measured().draw(ax)


def test_the_band_of_norms_says_whose_theory_it_is() -> None:
    pytest.importorskip("matplotlib")
    models = {"": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))}
    models[r": a stage multiplies norms by $\sqrt{2}$ to $\sqrt{e}$"] = nn.Sequential(
        WNResidualStage(2, 2, 3), nn.Flatten()
    )
    for growth, model in models.items():
        x = torch.randn(4, 2, 2, 2) if growth else torch.randn(4, 8)
        for axis in layer_norms(model, x).draw():
            assert f"theory of arpit2019's start{growth}" in axis.get_legend_handles_labels()[1]


def test_what_is_no_path_is_named() -> None:
    with pytest.raises(TypeError, match="path: expected a path, got None"):
        similarity(nn.Linear(5, 3), torch.randn(4, 5)).save(None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error", "ignore:.torch.jit.script. is deprecated")  # torch's own, by forward mode
def test_pictures_of_zeros_and_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).requires_grad_(False), torch.zeros(4, 5)
    for p in model.parameters():
        p.zero_()
    for measure in (layer_norms, layer_jacobians, jacobian_spectrum, jacobian_growth):
        picture = tmp_path / f"{measure.__name__}.png"
        measure(model, x).save(picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert jacobian_growth(nn.ReLU(), x).names == ()
