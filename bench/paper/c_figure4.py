"""The training loss over depth after Xavier's initialisation and after iterative orthogonalisation.

Plain ReLU MLPs without bias as in Figure 3: SGD at rate 0.01 without momentum, loss after 30 epochs. Orthogonalisation
as in the published code: from a batch of three times the width, exponent 1, hidden layers but the first; first layer
and head keep Xavier's weights.
"""

from __future__ import annotations

from typing import Any

import torch

import wnfused
from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, grouped
from bench.paper.plain import centred, loaded, relu_mlp, sgd

TITLE = "Training loss over depth: Xavier's init and iterative orthogonalisation"
SOURCE = "(c), Figure 4"
NOTE = "Digits in batches of 32 instead of CIFAR-10 in batches of 500, width 256 instead of 800."
MINUTES = 3.0
SETTINGS: dict[str, Json] = {
    "quick": {"data": "digits", "depths": [3, 6], "width": 16, "epochs": 2, "batch_size": 256, "seeds": 1},
    "small": {
        "data": "digits", "depths": [15, 30, 45, 60, 75], "width": 256, "epochs": 30, "batch_size": 32, "seeds": 4,
    },
    "full": {
        "data": "cifar10", "depths": [15, 30, 45, 60, 75], "width": 800, "epochs": 30, "batch_size": 500, "seeds": 4,
    },
}  # fmt: skip
LR = 0.01
INITS = {"xavier": "Xavier", "iterative": "iterative orthogonalisation"}


def jobs(settings: Json) -> list[Job]:
    shared = {key: settings[key] for key in ("data", "width", "epochs", "batch_size")}
    return [
        Job(f"{init}-{depth}-{seed}", shared | {"init": init, "depth": depth, "seed": seed}, seed)
        for seed in range(settings["seeds"])
        for depth in settings["depths"]
        for init in INITS
    ]


def run(parameters: Json) -> Json:
    data = loaded(parameters["data"])
    images, labels = centred(data), data.train.labels
    model = relu_mlp(parameters["depth"], parameters["width"], images[0].numel(), data.classes)
    generator = torch.Generator().manual_seed(parameters["seed"])
    if parameters["init"] == "xavier":
        wnfused.init.initialize(model, "xavier", generator=generator, distribution="uniform", gain=2**0.5)
    else:
        sample = images[torch.randperm(len(images), generator=generator)[: 3 * parameters["width"]]]
        wnfused.init.initialize(model, "daneshmand2021", sample=sample, generator=generator, slice="raw", exponent=1.0)
    losses = sgd(
        model, images, labels, lr=LR, batch_size=parameters["batch_size"], epochs=parameters["epochs"],
        seed=parameters["seed"],
    )  # fmt: skip
    return {"losses": losses}


def reduce(settings: Json, results: list[Result]) -> Json:
    points = []
    for (init, depth), members in grouped(results, lambda r: (r["init"], r["depth"])).items():
        loss = Spread.of(r["losses"][-1] for r in members)
        points.append({"init": init, "depth": depth, "loss": loss.mean, "std": loss.std, "seeds": loss.count})
    return {"points": sorted(points, key=lambda p: p["depth"])}


def verdicts(data: Json) -> list[Verdict]:
    claim = "Xavier's loss rises with depth, that after iterative orthogonalisation stays low"
    curves = {init: {p["depth"]: p["loss"] for p in data["points"] if p["init"] == init} for init in INITS}
    both = sorted(set(curves["xavier"]) & set(curves["iterative"]))
    xavier, iterative = ([curves[init][d] for d in both] for init in INITS)
    if len(both) < 2 or None in xavier or None in iterative:
        return [Verdict(claim, f"too little was run, or a run diverged: {curves}", None)]
    rose = xavier[-1] - xavier[0]
    return [
        Verdict(
            claim,
            f"depths {both}: Xavier " + ", ".join(f"{v:.2f}" for v in xavier)
            + "; iterative " + ", ".join(f"{v:.2f}" for v in iterative),
            rose > 0.1 and iterative[-1] < xavier[-1] and iterative[-1] - iterative[0] < rose / 2,
        )
    ]  # fmt: skip


def draw(data: Json) -> Any:
    figure, (axis,) = drawing.panels(1, width=5.6)
    for i, (init, name) in enumerate(INITS.items()):
        points = [p for p in data["points"] if p["init"] == init]
        x = [p["depth"] for p in points]
        drawing.band(axis, x, [p["loss"] for p in points], [p["std"] for p in points], drawing.style(i), name)
    axis.set_xticks(sorted({p["depth"] for p in data["points"]}))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("layers")
    axis.set_ylabel("training loss, last epoch")
    drawing.legend(axis)
    return figure
