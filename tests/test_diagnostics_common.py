"""What all measurements share: they keep no activation longer than the network does, and show progress when asked."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wnfused.diagnostics import jacobian_growth, layer_jacobians, layer_norms, orthogonality, similarity
from wnfused.diagnostics.progress import advancing
from wnfused.diagnostics.stations import Call, observed
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
