"""The orthogonality gap at initialisation beside the training loss, over depth and while training.

Plain ReLU MLPs without bias under Xavier's uniform init with gain sqrt 2, SGD at rate 0.01 without momentum. Left (a):
the gap of the last layer's outputs before training, and the loss after it, over the number of layers. Right (b): both
after every epoch, at 20 layers. The published code measures the gap of the ten logits, ``|| s/||s|| - 1/sqrt k ||``;
the paper's own V of the same outputs stands beside it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

import wnfused
from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, all_known, grouped, number
from bench.paper.plain import centred, loaded, logits_gap, relu_mlp, sgd
from wnfused.diagnostics import orthogonality_gap

TITLE = "The orthogonality gap and the training loss"
SOURCE = "(c), Figure 3"
NOTE = (
    "Digits in batches of 32 instead of CIFAR-10 in batches of 500, width 256 instead of 800 and 1,000. An epoch is 41 "
    "updates instead of 100."
)
MINUTES = 2.5
SETTINGS: dict[str, Json] = {
    "quick": {
        "data": "digits", "depths": [3, 6], "width": 16, "epochs": 2, "batch_size": 256, "measured": 64, "seeds": 1,
        "training": {"depth": 4, "width": 16, "epochs": 3, "seeds": 1},
    },
    "small": {
        "data": "digits", "depths": [15, 30, 45, 60, 75], "width": 256, "epochs": 30, "batch_size": 32, "measured": 500,
        "seeds": 4, "training": {"depth": 20, "width": 256, "epochs": 50, "seeds": 5},
    },
    "full": {
        "data": "cifar10", "depths": [15, 30, 45, 60, 75], "width": 800, "epochs": 30, "batch_size": 500,
        "measured": 500, "seeds": 4, "training": {"depth": 20, "width": 1000, "epochs": 50, "seeds": 5},
    },
}  # fmt: skip
LR = 0.01


def jobs(settings: Json) -> list[Job]:
    shared = {key: settings[key] for key in ("data", "batch_size", "measured")}
    training = settings["training"]
    over_depth = {"panel": "depth", "width": settings["width"], "epochs": settings["epochs"]}
    while_training = {"panel": "training"} | {key: training[key] for key in ("depth", "width", "epochs")}
    made = []
    for seed in range(max(settings["seeds"], training["seeds"])):
        if seed < training["seeds"]:
            made.append(Job(f"training-{seed}", shared | while_training | {"seed": seed}, seed))
        if seed < settings["seeds"]:
            made += [
                Job(f"depth-{depth}-{seed}", shared | over_depth | {"depth": depth, "seed": seed}, seed)
                for depth in settings["depths"]
            ]
    return made


def run(parameters: Json) -> Json:
    data = loaded(parameters["data"])
    images, labels = centred(data), data.train.labels
    model = relu_mlp(parameters["depth"], parameters["width"], images[0].numel(), data.classes)
    generator = torch.Generator().manual_seed(parameters["seed"])
    wnfused.init.initialize(model, "xavier", generator=generator, distribution="uniform", gain=2**0.5)
    gaps: list[float | None] = []
    code_gaps: list[float | None] = []

    @torch.no_grad()
    def measure() -> None:
        outputs = model(images[: parameters["measured"]])
        gaps.append(number(orthogonality_gap(outputs.T)))
        code_gaps.append(logits_gap(outputs))

    measure()
    losses = sgd(
        model, images, labels, lr=LR, batch_size=parameters["batch_size"], epochs=parameters["epochs"],
        seed=parameters["seed"], after_epoch=measure if parameters["panel"] == "training" else lambda: None,
    )  # fmt: skip
    return {"gap": gaps, "code_gap": code_gaps, "loss": losses}


def reduce(settings: Json, results: list[Result]) -> Json:
    panels = grouped(results, lambda r: r["panel"])
    depth = []
    for layers, members in grouped(panels.get("depth", []), lambda r: r["depth"]).items():
        point: Json = {"depth": layers, "seeds": len(members)}
        for name, at in (("gap", 0), ("code_gap", 0), ("loss", -1)):
            spread = Spread.of(r[name][at] for r in members)
            point |= {name: spread.mean, f"{name}_std": spread.std}
        depth.append(point)
    training: Json = {}
    for name, skip in (("gap", 1), ("code_gap", 1), ("loss", 0)):
        # The gap has a value before the first epoch, the loss has not.
        epochs = zip(*(r[name][skip:] for r in panels.get("training", [])), strict=False)
        spreads = [Spread.of(values) for values in epochs]
        training |= {name: [s.mean for s in spreads], f"{name}_std": [s.std for s in spreads]}
    return {"depth": sorted(depth, key=lambda p: p["depth"]), "training": training}


def rises(values: list[float | None]) -> bool | None:
    """Ends higher than it began, with most steps upwards; None without two values."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return None
    ups = sum(b > a for a, b in itertools.pairwise(known))
    return known[-1] > known[0] and ups > (len(known) - 1) / 2


def verdicts(data: Json) -> list[Verdict]:
    points, training = data["depth"], data["training"]
    gap, code, loss = ([p[name] for p in points] for name in ("gap", "code_gap", "loss"))
    depths = [p["depth"] for p in points]
    made = [
        Verdict(
            "over depth the gap before training and the loss after it both rise",
            f"depths {depths}: V {_listed(gap)}, the code's gap {_listed(code)}, loss {_listed(loss)}",
            all_known([rises(gap), rises(loss)]),
        )
    ]
    gaps, losses = training["gap"], training["loss"]
    if len(gaps) > 2 and None not in gaps and None not in losses:
        together = torch.corrcoef(torch.tensor([gaps, losses]))[0, 1].item()
        made.append(
            Verdict(
                "while training the gap and the loss fall together",
                f"V {gaps[0]:.2f} to {gaps[-1]:.2f}, loss {losses[0]:.2f} to {losses[-1]:.2f}, correlation over the "
                f"epochs {together:.2f}",
                gaps[-1] < gaps[0] and losses[-1] < losses[0] and together > 0.5,
            )
        )
    return made


def _listed(values: list[float | None]) -> str:
    return ", ".join("-" if v is None else f"{v:.2f}" for v in values)


def draw(data: Json) -> Any:
    figure, axes = drawing.panels(2, width=5.2)
    points, training = data["depth"], data["training"]
    names = {"gap": "gap V", "code_gap": "gap, as in the code", "loss": "training loss"}
    for panel, axis in enumerate(axes):
        right = axis.twinx()
        right.spines["top"].set_visible(False)
        for i, (name, label) in enumerate(names.items()):
            on = right if name == "loss" else axis
            if panel == 0:
                x = [p["depth"] for p in points]
                values, stds = [p[name] for p in points], [p[f"{name}_std"] for p in points]
            else:
                values, stds = training[name], training[f"{name}_std"]
                x = range(1, len(values) + 1)
            drawing.band(on, x, values, stds, drawing.style(i, markers=panel == 0), label)
        axis.set_xlabel(("layers", "epoch")[panel])
        axis.set_ylabel(("orthogonality gap before training", "orthogonality gap")[panel])
        right.set_ylabel(("training loss, last epoch", "training loss")[panel])
        if panel == 0:
            axis.set_xticks([p["depth"] for p in points])
            handles = [*axis.get_lines(), *right.get_lines()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
