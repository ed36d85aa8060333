"""Training deep AlexNet-like networks after Xavier's initialisation and after iterative orthogonalisation.

3x3 convolutions (Table 3): 3-64 of stride 2, pool, ReLU; 64-192, pool, ReLU; 192-192, ReLU; 192-256; 256-256, ReLU;
{256-256, ReLU} 15 or 75 times (published code); pool; dropout, 1024-4096; dropout, 4096-4096; 4096-10. SGD at rate
0.001 without momentum, batch 30, 20 epochs. Orthogonalised are the convolutions with as many inputs as outputs, with
exponent 1/2, from 256 images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import wnfused
from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, grouped
from bench.paper.plain import centred, loaded, sgd

TITLE = "Training 20 and 80 convolutions: Xavier's init and iterative orthogonalisation"
SOURCE = "(c), Figure 7 and Table 3"
NOTE = (
    "Digits instead of CIFAR-10: channels and units an eighth of the paper's, without pooling (8x8 images become 4x4 "
    "by the stride). 20 epochs are 860 updates instead of 33,000, so the rate is 0.03 instead of 0.001: about the same "
    "in all."
)
MINUTES = 4.0
SETTINGS: dict[str, Json] = {
    "quick": {
        "data": "digits", "share": 16, "pool": False, "extra": [1, 3], "lr": 0.03, "batch_size": 128, "epochs": 2,
        "sample": 256, "seeds": 1,
    },
    "small": {
        "data": "digits", "share": 8, "pool": False, "extra": [15, 75], "lr": 0.03, "batch_size": 30, "epochs": 20,
        "sample": 256, "seeds": 4,
    },
    "full": {
        "data": "cifar10", "share": 1, "pool": True, "extra": [15, 75], "lr": 0.001, "batch_size": 30, "epochs": 20,
        "sample": 256, "seeds": 4,
    },
}  # fmt: skip
INITS = {"xavier": "Xavier", "iterative": "iterative orthogonalisation"}
# Convolutions before the repeated ones.
FIRST = 5


def jobs(settings: Json) -> list[Job]:
    shared = {key: settings[key] for key in ("data", "share", "pool", "lr", "batch_size", "epochs", "sample")}
    return [
        Job(f"{init}-{extra}-{seed}", shared | {"init": init, "extra": extra, "seed": seed}, seed)
        for seed in range(settings["seeds"])
        for extra in settings["extra"]
        for init in INITS
    ]


def build(extra: int, share: int, pool: bool, shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    a, b, c, units = (n // share for n in (64, 192, 256, 4096))

    def conv(n: int, m: int, stride: int = 1) -> nn.Module:
        return nn.Conv2d(n, m, 3, stride, 1, bias=False)

    pooled: list[nn.Module] = [nn.MaxPool2d(2)] if pool else []
    side = (shape[1] // 2) // (8 if pool else 1)
    repeated = [layer for _ in range(extra) for layer in (conv(c, c), nn.ReLU())]
    return nn.Sequential(
        conv(shape[0], a, 2), *pooled, nn.ReLU(), conv(a, b), *pooled, nn.ReLU(), conv(b, b), nn.ReLU(), conv(b, c),
        conv(c, c), nn.ReLU(), *repeated, *pooled, nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(c * side * side, units), nn.ReLU(), nn.Dropout(0.5), nn.Linear(units, units), nn.ReLU(),
        nn.Linear(units, classes),
    )  # fmt: skip


def run(parameters: Json) -> Json:
    data = loaded(parameters["data"])
    images, labels = centred(data), data.train.labels
    model = build(parameters["extra"], parameters["share"], parameters["pool"], data.shape, data.classes)
    generator = torch.Generator().manual_seed(parameters["seed"])
    wnfused.init.initialize(model, "xavier", generator=generator, distribution="uniform", gain=2**0.5)
    if parameters["init"] == "iterative":
        convolutions = model[: next(i for i, layer in enumerate(model) if isinstance(layer, nn.Flatten))]
        sample = images[torch.randperm(len(images), generator=generator)[: parameters["sample"]]]
        wnfused.init.initialize(
            convolutions,
            "daneshmand2021",
            sample=sample,
            generator=generator,
            slice="raw",
            exponent=0.5,
            layers="square",
        )
    losses = sgd(
        model, images, labels, lr=parameters["lr"], batch_size=parameters["batch_size"], epochs=parameters["epochs"],
        seed=parameters["seed"],
    )  # fmt: skip
    return {"losses": losses}


def reduce(settings: Json, results: list[Result]) -> Json:
    curves = []
    for (init, extra), members in grouped(results, lambda r: (r["init"], r["extra"])).items():
        spreads = [Spread.of(epoch) for epoch in zip(*(r["losses"] for r in members), strict=True)]
        curves.append(
            {"init": init, "convolutions": FIRST + extra, "seeds": len(members), "loss": [s.mean for s in spreads],
             "std": [s.std for s in spreads]}
        )  # fmt: skip
    return {"curves": curves}


def verdicts(data: Json) -> list[Verdict]:
    """Fast is a small mean loss over all epochs: the area under the curve."""
    areas = {
        (c["convolutions"], c["init"]): sum(c["loss"]) / len(c["loss"]) for c in data["curves"] if None not in c["loss"]
    }
    depths = sorted({depth for depth, _ in areas})
    made = []
    for depth, claim in zip(depths, ("slower", "clearly faster"), strict=False):
        if (depth, "xavier") in areas and (depth, "iterative") in areas:
            xavier, iterative = areas[depth, "xavier"], areas[depth, "iterative"]
            agrees = iterative > xavier if claim == "slower" else iterative < 0.9 * xavier
            made.append(
                Verdict(
                    f"{depth} convolutions: training after orthogonalisation is {claim} than after Xavier's init",
                    f"mean loss over the epochs {iterative:.2f} and {xavier:.2f}",
                    agrees,
                )
            )
    return made or [Verdict("orthogonalisation helps the deep network", "too little was run, or it diverged", None)]


def draw(data: Json) -> Any:
    depths = sorted({c["convolutions"] for c in data["curves"]})
    figure, axes = drawing.panels(len(depths))
    for axis, depth in zip(axes, depths, strict=True):
        for i, (init, name) in enumerate(INITS.items()):
            for curve in data["curves"]:
                if (curve["convolutions"], curve["init"]) == (depth, init):
                    x = range(1, len(curve["loss"]) + 1)
                    drawing.band(axis, x, curve["loss"], curve["std"], drawing.style(i, markers=False), name)
        axis.set_title(f"{depth} convolutions", fontsize=10)
        axis.set_xlabel("epoch")
        axis.set_ylabel("training loss")
        axis.set_ylim(bottom=0)
        drawing.whole_ticks(axis)
    drawing.legend(axes[0])
    return figure
