"""What the demo can afford: one step of each network is timed, then epochs and depths are fitted into the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from wnfused.train.batches import Batch
from wnfused.train.build import build
from wnfused.train.config import TrainConfig
from wnfused.train.data import Dataset
from wnfused.train.step import step


@dataclass(frozen=True)
class Recipe:
    """How one depth is trained; the rates are those that were found to train it with the default initialisation."""

    depth: int
    epochs: int
    batch_size: int
    lr: float
    warmup: float

    def config(self, init: str) -> TrainConfig:
        # torch_default takes orthogonal directions unless told otherwise, as the paper's figures do.
        return TrainConfig(
            depth=self.depth,
            init=init,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            warmup=self.warmup,
        )

    def shortened(self, epochs: int) -> Recipe:
        """At most so many epochs; a run that loses some keeps at most a quarter of the rest for the warm-up."""
        return self if epochs >= self.epochs else replace(self, epochs=epochs, warmup=min(self.warmup, epochs / 4))

    def updates(self, images: int) -> int:
        return self.epochs * math.ceil(images / self.batch_size)


@dataclass(frozen=True)
class Plan:
    """What will be trained, how long it should take, and in words what had to be left out."""

    recipes: tuple[Recipe, ...]
    seconds: float
    note: str


def fit(recipes: Sequence[Recipe], step_seconds: Sequence[float], images: int, runs: int, budget: float) -> Plan:
    """Fewer epochs first, down to one, then fewer depths, the deepest first; the shallowest always stays.

    Args:
        step_seconds: of each recipe; ``images``: of an epoch; ``runs``: how often each recipe is trained;
        budget: in seconds.
    """
    chosen, costs = list(recipes), list(step_seconds)
    left_out: list[int] = []
    while True:
        for epochs in range(max(r.epochs for r in chosen), 0, -1):
            shortened = tuple(r.shortened(epochs) for r in chosen)
            seconds = sum(runs * r.updates(images) * c for r, c in zip(shortened, costs, strict=True))
            if seconds <= budget:
                return Plan(shortened, seconds, _note(recipes, shortened, left_out, budget))
        if len(chosen) == 1:
            return Plan(shortened, seconds, _note(recipes, shortened, left_out, budget))
        left_out.append(chosen.pop().depth)
        costs.pop()


class Schedule:
    """Recipes from the shallowest on, fitted into the time once more whenever one of them is done.

    What was given up comes back where there is time for it after all: a machine that was busy when the steps were timed
    may be free by then, and runs that diverge end early. Nothing is given up later.

    Attributes:
        plan: of what is still to be trained.
    """

    def __init__(
        self, recipes: Sequence[Recipe], step_seconds: Sequence[float], images: int, runs: int, budget: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """Arguments as those of ``fit``, and what tells the time."""
        self._recipes, self._costs, self._trained = list(recipes), list(step_seconds), list[Recipe]()
        self._all, self._images, self._runs, self._budget = tuple(recipes), images, runs, budget
        self._clock, self._ends = clock, clock() + budget
        self.plan = fit(self._recipes, self._costs, images, runs, budget)

    def begin(self) -> Recipe | None:
        """What to train next; None: nothing is left, or no time for it."""
        return self.plan.recipes[0] if self.plan.recipes else None

    def end(self, step_seconds: float) -> None:
        """It was trained, at so many seconds a step; 0 if it came to none, as runs that diverge at once."""
        self._trained.append(self.plan.recipes[0])
        self._recipes.pop(0)
        slower = step_seconds / self._costs.pop(0) or 1.0
        self._costs = [cost * slower for cost in self._costs]
        self.plan = replace(self.plan, recipes=self.plan.recipes[1:])
        if self._recipes:
            left = self._ends - self._clock()
            anew = fit(self._recipes, self._costs, self._images, self._runs, left)
            if anew.seconds <= left and _covers(anew.recipes, self.plan.recipes):
                self.plan = anew

    @property
    def note(self) -> str:
        """In words, what of all the recipes was left out, or is going to be."""
        chosen = (*self._trained, *self.plan.recipes)
        return _note(self._all, chosen, [r.depth for r in reversed(self._all[len(chosen) :])], self._budget)


def _covers(recipes: Sequence[Recipe], others: Sequence[Recipe]) -> bool:
    """Whether these are the same depths, or more of them, each for as many epochs or more."""
    return len(recipes) >= len(others) and all(r.epochs >= o.epochs for r, o in zip(recipes, others, strict=False))


def _note(recipes: Sequence[Recipe], chosen: Sequence[Recipe], left_out: list[int], budget: float) -> str:
    depths: dict[str, list[str]] = {}
    for old, new in zip(recipes, chosen, strict=False):
        if old.epochs != new.epochs:
            depths.setdefault(f"{new.epochs} instead of {old.epochs} epochs", []).append(f"{old.depth:,}")
    changes = [f"{epochs} for {' and '.join(which)} layers" for epochs, which in depths.items()]
    changes += [f"{depth:,} layers left out" for depth in reversed(left_out)]
    return f"scaled to {budget:.0f} s of training: {', '.join(changes)}" if changes else ""


def time_step(recipe: Recipe, data: Dataset) -> float:
    """Seconds of one update: the faster of two, after one that allocates."""
    model = build(recipe.config("arpit2019"), data)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9)
    batch = first_batch(data, recipe.batch_size)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        update(model, optimizer, batch)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def first_batch(data: Dataset, size: int) -> Batch:
    """The first training images, not augmented."""
    images, labels = data.standardise(data.train.images[:size]), data.train.labels[:size]
    n = len(labels)
    return Batch(images, labels, None, torch.ones(n), torch.ones(n, dtype=torch.bool), 1 / n)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward and one update."""
    optimizer.zero_grad()
    step(model, batch).loss.backward()
    optimizer.step()
