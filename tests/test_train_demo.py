"""The demo's plan, and a demo of shallow networks from end to end."""

import json
from pathlib import Path

import pytest

from wnfused.train import demo as module
from wnfused.train.budget import Recipe, fit

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


RECIPES = (Recipe(40, 4, 32, 0.02, 0), Recipe(202, 4, 32, 0.02, 0), Recipe(1000, 4, 64, 0.01, 1))
# Updates of an epoch of 1280 images: 40, 40, 20. Seconds of an epoch, for two runs: 8, 40, 80.
COSTS = (0.1, 0.5, 2.0)


@pytest.mark.parametrize(
    ("budget", "depths", "epochs", "seconds"),
    [
        (1000, [40, 202, 1000], [4, 4, 4], 512),
        (512, [40, 202, 1000], [4, 4, 4], 512),
        (511, [40, 202, 1000], [3, 3, 3], 384),
        (130, [40, 202, 1000], [1, 1, 1], 128),
        (127, [40, 202], [2, 2], 96),
        (30, [40], [3], 24),
        (0, [40], [1], 8),
    ],
)
def test_epochs_are_given_up_before_depths(budget: float, depths: list[int], epochs: list[int], seconds: float) -> None:
    plan = fit(RECIPES, COSTS, 1280, 2, budget)
    assert [r.depth for r in plan.recipes] == depths
    assert [r.epochs for r in plan.recipes] == epochs
    assert plan.seconds == pytest.approx(seconds)
    full = (depths, epochs) == ([40, 202, 1000], [4, 4, 4])
    assert (plan.note == "") == full
    if epochs == [3, 3, 3]:
        assert plan.note.endswith(": 3 instead of 4 epochs for 40 and 202 and 1,000 layers")
    for depth in {40, 202, 1000} - set(depths):
        assert f"{depth:,} layers left out" in plan.note


def test_a_shortened_run_has_a_shorter_warm_up() -> None:
    assert Recipe(1000, 1, 64, 0.01, 1).config("arpit2019").warmup == 0.25
    assert Recipe(1000, 4, 64, 0.01, 1).config("arpit2019").warmup == 1


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shallow = (Recipe(16, 2, 128, 0.02, 0), Recipe(22, 2, 128, 1e20, 0))
    monkeypatch.setattr(module, "RECIPES", shallow)
    monkeypatch.setattr(module, "DEEP", Recipe(28, 1, 128, 0.003, 1))
    assert module.demo(tmp_path, minutes=5) == 0
    printed = capsys.readouterr().out
    for part in ("test accuracy", "diverged", "one training step of 128 images takes"):
        assert part in printed
    content = json.loads((tmp_path / "demo.json").read_text())
    rows = {(row["depth"], row["init"]): row["accuracy"] for row in content["rows"]}
    assert rows.keys() == {(d, i) for d in (16, 22) for i in ("arpit2019", "torch_default")}
    assert rows[16, "arpit2019"] > 0.2
    assert rows[22, "arpit2019"] is None
    for picture in ("accuracy.png", "norms.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
