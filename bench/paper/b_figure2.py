"""Test accuracy after a first epoch over depth, without normalisation and with it, at the same large rate.

WRN of width 1 on CIFAR-10, rate 0.1, momentum 0.9, weight decay 5e-4, batch 128 (64 at depth 10,000), depths 10 to
10,000; batch norm, ZeroInit, LSUV, 1/2-scaling.
"""

from __future__ import annotations

from typing import Any

from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, all_known, grouped
from bench.paper.peers import file_name, network
from bench.paper.training import TEST_IMAGES, larger, trained

TITLE = "Accuracy over depth after a first epoch at rate 0.1"
SOURCE = "(b), Figure 2"
NOTE = (
    "Digits instead of CIFAR-10; eight epochs, 88 updates, stand for the 391 updates of one epoch of CIFAR-10. "
    "ZeroInit with its scalars at a tenth of the rate, as in its published code. In a first run nothing without "
    "normalisation trained at any depth, and batch norm at depth 10 and 40 only: batches were of 32, for which a rate "
    "of 0.1 is too large, ZeroInit lacked its scalars, and batch norm's shortcuts carried the normalised stream. "
    "Changed after a first look: the second verdict asks that something trains at a smaller depth, and the first is "
    "undecided where ZeroInit is behind by less than two standard errors of that many test images (360 a seed)."
)
MINUTES = 6.0
SETTINGS: dict[str, Json] = {
    "quick": {"data": "digits", "depths": [10], "epochs": 1, "batch_size": 128, "small_batch": [], "seeds": 1},
    "small": {
        "data": "digits", "depths": [10, 40, 100, 202, 304], "epochs": 8, "batch_size": 128, "small_batch": [],
        "seeds": 3,
    },
    "full": {
        "data": "cifar10", "depths": [10, 100, 1000, 10000], "epochs": 1, "batch_size": 128, "small_batch": [10000],
        "seeds": 1,
    },
}  # fmt: skip
METHODS = ("ZeroInit", "batch norm", "LSUV", "1/2-scaling")
# Five times chance, of ten classes.
TRAINED = 0.5


def jobs(settings: Json) -> list[Job]:
    shared = {
        "data": settings["data"], "epochs": settings["epochs"], "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4,
        "crop_flip": settings["data"] == "cifar10",
    }  # fmt: skip
    return [
        Job(
            f"{file_name(method)}-{depth}-{seed}",
            {
                "method": method, "layers": depth,
                "options": shared | network(method, depth) | {
                    "seed": seed,
                    "batch_size": 64 if depth in settings["small_batch"] else settings["batch_size"],
                },
            },
            round=seed,
        )
        for seed in range(settings["seeds"])
        for depth in settings["depths"]
        for method in METHODS
    ]  # fmt: skip


def run(parameters: Json) -> Json:
    return trained(parameters["options"])


def reduce(settings: Json, results: list[Result]) -> Json:
    points = []
    for (method, depth), members in grouped(results, lambda r: (r["method"], r["layers"])).items():
        accuracy = Spread.of(r["test_accuracy"] for r in members)
        points.append(
            {"method": method, "depth": depth, "accuracy": accuracy.mean, "std": accuracy.std,
             "seeds": accuracy.count, "images": TEST_IMAGES[settings["data"]],
             "diverged": sum(r["diverged"] for r in members)}
        )  # fmt: skip
    return {"points": points}


def verdicts(data: Json) -> list[Verdict]:
    found = {(p["method"], p["depth"]): p["accuracy"] for p in data["points"]}
    images = {(p["method"], p["depth"]): p["images"] * p["seeds"] for p in data["points"]}
    depths = sorted({depth for _, depth in found})

    def shown(method: str, at: list[int]) -> str:
        return f"{method} " + ", ".join(f"{100 * found[method, d]:.0f}%" for d in at)

    def at(*methods: str) -> list[int]:
        return [d for d in depths if all((m, d) in found for m in methods)]

    def as_good(depth: int) -> bool | None:
        mine, other = found["ZeroInit", depth], found["batch norm", depth]
        if mine >= other:
            return True
        counted = min(images["ZeroInit", depth], images["batch norm", depth])
        return False if larger(other, mine, counted) else None

    both = at("ZeroInit", "batch norm")
    good = all_known(map(as_good, both))
    spread = {p["depth"]: p["std"] for p in data["points"] if p["method"] == "ZeroInit"}
    split = [d for d in both if spread[d] > 0.25]
    behind = max((found["batch norm", d] - found["ZeroInit", d] for d in both if d not in split), default=0.0)
    others = ("LSUV", "1/2-scaling")
    run_at = at(*others)
    past = [d for d in run_at if d > 100]
    trained_past = [found[m, d] >= TRAINED for m in others for d in past]
    # What trains at no depth says nothing of depth.
    shallow = all(any(found[m, d] >= TRAINED for d in run_at if d <= 100) for m in others)
    return [
        Verdict(
            "ZeroInit is as good as batch norm at every depth",
            f"depths {both}: {shown('ZeroInit', both)}; {shown('batch norm', both)}",
            good,
            "the test images do not tell them apart."
            if good is None
            else f"where its seeds agree, ZeroInit is behind by up to {100 * behind:.1f} points after 88 updates."
            + (f" At depth {', '.join(map(str, split))} some train and some do not." if split else ""),
        ),
        Verdict(
            "LSUV and 1/2-scaling do not train past 100 layers (here: stay below 50%)",
            f"depths {run_at}: " + "; ".join(shown(m, run_at) for m in others),
            all_known([not t for t in trained_past]) if shallow else None,
            "" if shallow else "at this rate neither trains at any depth, 10 included: what depth does is not told.",
        ),
    ]


def draw(data: Json) -> Any:
    figure, (axis,) = drawing.panels(1, width=6.0)
    for i, method in enumerate(METHODS):
        points = sorted((p for p in data["points"] if p["method"] == method), key=lambda p: p["depth"])
        axis.errorbar(
            [p["depth"] for p in points], [100 * p["accuracy"] for p in points], [100 * p["std"] for p in points],
            capsize=3, label=method, **drawing.style(i),
        )  # fmt: skip
    axis.axhline(10, color="0.6", linewidth=1, linestyle=":")
    axis.annotate("chance", (0.99, 11), xycoords=("axes fraction", "data"), ha="right", color="0.4", size=9)
    drawing.depth_ticks(axis, {p["depth"] for p in data["points"]})
    axis.set_ylim(-2, 102)
    axis.set_xlabel("depth (layers)")
    axis.set_ylabel("test accuracy (%), 0: diverged")
    drawing.legend(axis, loc="center left")
    return figure
