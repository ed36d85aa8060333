"""Training runs as jobs: ``wnfused.train`` in a folder of its own, of whose result a few numbers are kept."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.paper.figure import Json, Result, grouped
from wnfused.train import TrainConfig, train

# Where runs under way lie; the runner sets it. A stopped run goes on from its last epoch.
scratch = Path(tempfile.gettempdir())

KEPT = ("test_accuracy", "best_test_accuracy", "best_val_accuracy", "train_loss", "diverged", "epochs_finished")


# Of which a test accuracy is the share.
TEST_IMAGES = {"digits": 360, "mnist": 10_000, "cifar10": 10_000, "cifar100": 10_000}


def trained(options: Json) -> Json:
    """The result of ``TrainConfig(**options)``; see ``wnfused.train.run`` for what it holds.

    ``train_losses`` and ``train_accuracies`` hold one value for each finished epoch.
    """
    config = TrainConfig.from_dict(options)
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    folder = scratch / f"run-{digest}"
    result = train(config, folder, resume=True)
    shutil.rmtree(folder)
    history = result["history"]
    kept: dict[str, Any] = {name: result[name] for name in KEPT}
    kept["train_losses"] = [row["train_loss"] for row in history]
    kept["train_accuracies"] = [row["train_accuracy"] for row in history]
    return kept


def steps_at(epochs: int, shares: Iterable[float]) -> list[int]:
    """The epochs at which the rate falls, as shares of all of them; those at the very beginning are left out."""
    return sorted({round(share * epochs) for share in shares} - {0})


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def larger(a: float, b: float, images: int) -> bool | None:
    """Whether the share a of so many images is larger than the share b of as many others; None within two standard
    errors of the difference."""
    if abs(a - b) <= 2 * math.sqrt((a * (1 - a) + b * (1 - b)) / images):
        return None
    return a > b


def by_rate(
    results: Iterable[Result], cell: Callable[[Result], Any], grid: Callable[[Result], Iterable[float]]
) -> dict[Any, dict[float, list[Result]]]:
    """``{cell: {learning rate: its seeds}}``, of the cells whose whole ``grid`` of rates was run: the best of a part
    says nothing of the best."""
    cells = {}
    for key, members in grouped(results, cell).items():
        rates = dict(sorted(grouped(members, lambda r: r["lr"]).items()))
        if rates.keys() >= set(grid(members[0])):
            cells[key] = rates
    return cells


def best_rate(rates: dict[float, list[Result]]) -> float:
    """The rate with the best mean accuracy; a diverged seed counts as 0. The first of equals, the smallest, wins."""
    means = {lr: mean((r["best_val_accuracy"] or 0.0) for r in seeds) or 0.0 for lr, seeds in rates.items()}
    return max(means, key=lambda lr: means[lr])


def largest_stable(rates: dict[float, list[Result]]) -> float | None:
    """The largest rate at which, and at every smaller one, no seed diverged; None if the smallest fails."""
    stable = None
    for lr, seeds in sorted(rates.items()):
        if any(r["diverged"] for r in seeds):
            break
        stable = lr
    return stable


def largest_trained(rates: dict[float, list[Result]], least: float) -> float | None:
    """The largest rate at which the mean test accuracy is ``least`` or more; None if there is none."""
    good = [lr for lr, seeds in rates.items() if (mean(r["test_accuracy"] for r in seeds) or 0.0) >= least]
    return max(good, default=None)
