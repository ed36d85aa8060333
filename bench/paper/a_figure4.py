"""How many of 20 seeds survive three epochs, over learning rates, with and without warm-up.

The paper trains WRN-40-10 on CIFAR-10 (batch 128, momentum 0.9, weight decay 5e-4); its grid of rates is not in the
text. A run survives if no loss was NaN or infinite. The warm-up is the published code's, quadratic, over one epoch.
"""

from __future__ import annotations

from typing import Any

from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Verdict, grouped
from bench.paper.training import trained

TITLE = "Share of seeds that survive three epochs"
SOURCE = "(a), Figure 4"
NOTE = (
    "WRN-40-1 on digits in batches of 128, that is 33 updates in all, instead of WRN-40-10 on CIFAR-10. "
    "The rates span what all and what no run survives; a first grid from 0.03 to 3 was dead above 0.1."
)
MINUTES = 6.0
SETTINGS: dict[str, Json] = {
    "quick": {"data": "digits", "depth": 10, "width": 1, "rates": [1e4], "seeds": 1, "seeds_a_round": 1},
    "small": {
        "data": "digits", "depth": 40, "width": 1, "rates": [0.003, 0.01, 0.03, 0.1, 0.3], "seeds": 20,
        "seeds_a_round": 2,
    },
    "full": {
        "data": "cifar10", "depth": 40, "width": 10, "rates": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0], "seeds": 20,
        "seeds_a_round": 1,
    },
}  # fmt: skip
INITS = {
    "arpit2019": "proposed",
    "hanin2018": "stage-wise Hanin",
    "salimans2016": "data-dependent",
    "torch_default": "PyTorch default",
}


def jobs(settings: Json) -> list[Job]:
    shared = {
        "model": "wrn", "data": settings["data"], "depth": settings["depth"], "width": settings["width"], "epochs": 3,
        "batch_size": 128, "momentum": 0.9, "weight_decay": 5e-4, "crop_flip": settings["data"] == "cifar10",
    }  # fmt: skip
    return [
        Job(
            f"{init}-{lr:g}-{warmup}-{seed}",
            shared | {"init": init, "lr": lr, "warmup": float(warmup), "seed": seed},
            round=seed // settings["seeds_a_round"],
        )
        for seed in range(settings["seeds"])
        for lr in settings["rates"]
        for warmup in (0, 1)
        for init in INITS
    ]


def run(parameters: Json) -> Json:
    result = trained(parameters)
    return {"survived": not result["diverged"], "test_accuracy": result["test_accuracy"]}


def reduce(settings: Json, results: list[Result]) -> Json:
    cells = []
    for (init, lr, warmup), members in grouped(results, lambda r: (r["init"], r["lr"], r["warmup"])).items():
        survived = sum(r["survived"] for r in members)
        cells.append(
            {"init": init, "lr": lr, "warmup": warmup, "seeds": len(members), "share": survived / len(members)}
        )
    return {"cells": cells}


def verdicts(data: Json) -> list[Verdict]:
    share = {(c["init"], c["lr"], c["warmup"]): c["share"] for c in data["cells"]}
    cells = sorted({(lr, warmup) for _, lr, warmup in share})
    whole = [c for c in cells if all((init, *c) in share for init in INITS)]
    beaten = [
        f"{INITS[init]} at rate {lr:g}{' with warm-up' if warmup else ''}"
        for lr, warmup in whole
        for init in INITS
        if share[init, lr, warmup] > share["arpit2019", lr, warmup]
    ]
    rates = sorted({lr for _, lr, _ in share})
    both = [(i, lr) for i in INITS for lr in rates if (i, lr, 0.0) in share and (i, lr, 1.0) in share]
    means = {
        init: tuple(sum(share[i, lr, w] for i, lr in both if i == init) / len(rates) for w in (0.0, 1.0))
        for init in INITS
    }
    seeds = min((c["seeds"] for c in data["cells"]), default=0)
    return [
        Verdict(
            "the proposed init is the most robust in every cell",
            f"of {len(whole)} cells with {seeds} seeds or more, more survive with: {'; '.join(beaten) or 'no other'}",
            not beaten if whole else None,
        ),
        Verdict(
            "warm-up widens the range of rates for every init",
            "mean share without and with it: "
            + ", ".join(f"{INITS[i]} {100 * a:.0f}% and {100 * b:.0f}%" for i, (a, b) in means.items()),
            all(b > a for a, b in means.values()) if both else None,
            "probably the length. An epoch of warm-up is 11 updates here, no more than momentum remembers, and 391 in "
            "the paper; it moves no rate of this coarse grid from failing to surviving.",
        ),
    ]


def draw(data: Json) -> Any:
    figure, axes = drawing.panels(2, width=5.2)
    rates = sorted({c["lr"] for c in data["cells"]})
    for axis, warmup in zip(axes, (0.0, 1.0), strict=True):
        for i, (init, name) in enumerate(INITS.items()):
            cells = {c["lr"]: c["share"] for c in data["cells"] if (c["init"], c["warmup"]) == (init, warmup)}
            x = [rates.index(lr) + 0.2 * (i - (len(INITS) - 1) / 2) for lr in cells]
            bars = axis.bar(
                x, [100 * s for s in cells.values()], width=0.18, color=drawing.style(i)["color"], label=name
            )
            # A share of 0 is a result, not a gap.
            axis.bar_label(bars, [f"{100 * s:.0f}" for s in cells.values()], fontsize=7, color="0.3")
        axis.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates])
        axis.grid(False, axis="x")
        axis.set_ylim(0, 108)
        axis.set_xlabel("learning rate")
        axis.set_ylabel("runs that reach the end (%)")
        axis.set_title("with one epoch of warm-up" if warmup else "without warm-up", fontsize=10)
    drawing.legend(axes[1], loc="upper right", framealpha=0.9)
    return figure
