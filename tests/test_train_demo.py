"""The demo's plan, and a demo of shallow networks from end to end."""

import json
from pathlib import Path

import pytest

from wnfused.train import demo as module
from wnfused.train.budget import Recipe, Schedule, fit

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


def train(schedule: Schedule, now: list[float], step_seconds: dict[int, float]) -> list[tuple[int, int]]:
    """Depths and epochs as they come, where steps take so long; time passes with each."""
    trained = []
    while (recipe := schedule.begin()) is not None:
        trained.append((recipe.depth, recipe.epochs))
        now[0] += 2 * recipe.updates(1280) * step_seconds[recipe.depth]
        schedule.end(step_seconds[recipe.depth])
    return trained


@pytest.mark.parametrize(
    ("slower", "budget", "trained", "note"),
    [
        (1.0, 1000, [(40, 4), (202, 4), (1000, 4)], ""),
        # Timed in a busy second: what was given up comes back.
        (0.25, 127, [(40, 2), (202, 4), (1000, 4)], ": 2 instead of 4 epochs for 40 layers"),
        (0.25, 30, [(40, 3), (202, 2)], "2 instead of 4 epochs for 202 layers, 1,000 layers left out"),
        # Timed in a quiet one: what was begun is done.
        (1.5, 512, [(40, 4), (202, 4), (1000, 4)], ""),
    ],
)
def test_the_plan_is_made_anew_after_each_depth(
    slower: float, budget: float, trained: list[tuple[int, int]], note: str
) -> None:
    now = [0.0]
    schedule = Schedule(RECIPES, COSTS, 1280, 2, budget, clock=lambda: now[0])
    found = train(schedule, now, {r.depth: slower * cost for r, cost in zip(RECIPES, COSTS, strict=True)})
    assert found == trained
    assert now[0] <= max(1, slower) * budget
    assert schedule.note.endswith(note)
    assert (note == "") == (schedule.note == "")


def test_a_run_without_a_step_says_nothing_of_the_next_ones() -> None:
    schedule = Schedule(RECIPES, COSTS, 1280, 2, 1000, clock=lambda: 0.0)
    for recipe in RECIPES:
        assert schedule.begin() == recipe
        schedule.end(0.0)
    assert schedule.begin() is None


def test_a_shortened_run_has_a_shorter_warm_up() -> None:
    planned = {budget: fit(RECIPES, COSTS, 1280, 2, budget).recipes[2].config("arpit2019") for budget in (130, 1000)}
    assert (planned[130].epochs, planned[130].warmup) == (1, 0.25)
    assert (planned[1000].epochs, planned[1000].warmup) == (4, 1)


def test_a_run_that_nothing_shortens_has_the_warm_up_of_the_guide() -> None:
    config = module.DEEP.config("arpit2019")
    assert (config.depth, config.epochs, config.batch_size, config.lr, config.warmup) == (10_000, 2, 32, 0.003, 1)


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
