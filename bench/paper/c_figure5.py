"""The orthogonality gap over the layers of an MLP and of a convolutional network, with batch norm and without.

30 hidden layers of 100 units or channels (3x3, zero padding), each ReLU, layer, batch norm or nothing; Xavier's normal
init; batches of 8 images, 50 of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import wnfused
from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict
from bench.paper.plain import loaded
from wnfused.diagnostics import orthogonality

TITLE = "The orthogonality gap over the layers, with batch norm and without"
SOURCE = "(c), Figure 5"
NOTE = "Digits instead of CIFAR-10; otherwise the paper's sizes."
MINUTES = 1.0
_FULL = {"layers": 30, "width": 100, "batch_size": 8, "batches": 50}
SETTINGS: dict[str, Json] = {
    "quick": {"data": "digits", "layers": 6, "width": 16, "batch_size": 8, "batches": 2},
    "small": {"data": "digits", **_FULL},
    "full": {"data": "cifar10", **_FULL},
}
NETWORKS = ("MLP", "ConvNet")
NORMS = {"batch": "batch norm", "none": "vanilla"}


class Layer(nn.Sequential):
    """What the gap is measured after."""


def jobs(settings: Json) -> list[Job]:
    return [
        Job(f"{network}-{norm}", settings | {"network": network, "norm": norm})
        for network in NETWORKS
        for norm in NORMS
    ]


def build(parameters: Json, shape: tuple[int, int, int]) -> nn.Sequential:
    width, convolutional = parameters["width"], parameters["network"] == "ConvNet"
    n = shape[0] if convolutional else shape[0] * shape[1] * shape[2]
    layers: list[nn.Module] = [] if convolutional else [nn.Flatten()]
    for i in range(parameters["layers"]):
        linear = nn.Conv2d(n, width, 3, padding=1, bias=False) if convolutional else nn.Linear(n, width, bias=False)
        norm: list[nn.Module] = []
        if parameters["norm"] == "batch":
            norm.append(nn.BatchNorm2d(width) if convolutional else nn.BatchNorm1d(width))
        # The images are not rectified.
        layers.append(Layer(*([] if i == 0 else [nn.ReLU()]), linear, *norm))
        n = width
    return nn.Sequential(*layers)


def run(parameters: Json) -> Json:
    data = loaded(parameters["data"])
    model = build(parameters, data.shape)
    wnfused.init.initialize(model, "xavier", generator=torch.Generator().manual_seed(0), distribution="normal")
    gaps = []
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    for batch in order.split(parameters["batch_size"])[: parameters["batches"]]:
        images = data.standardise(data.train.images[batch])
        profile = orthogonality(model, images, filter=lambda name, module: isinstance(module, Layer))
        gaps.append(profile.gap.tolist())
    spreads = [Spread.of(layer) for layer in zip(*gaps, strict=True)]
    return {"mean": [s.mean for s in spreads], "std": [s.std for s in spreads]}


def reduce(settings: Json, results: list[Result]) -> Json:
    return {"curves": [{"network": r["network"], "norm": r["norm"], **r.values} for r in results]}


def verdicts(data: Json) -> list[Verdict]:
    curves = {(c["network"], c["norm"]): c["mean"] for c in data["curves"]}
    made = []
    for network in NETWORKS:
        if (network, "batch") not in curves or (network, "none") not in curves:
            continue
        batch, vanilla = curves[network, "batch"], curves[network, "none"]
        made.append(
            Verdict(
                "without batch norm the gap rises towards 1 over the layers, with it it falls and stays low",
                f"{network}: vanilla {vanilla[0]:.2f} to {vanilla[-1]:.2f}, "
                f"batch norm {batch[0]:.2f} to {batch[-1]:.2f}",
                vanilla[-1] > 0.8 and vanilla[-1] > vanilla[0] and batch[-1] < batch[0] and batch[-1] < 0.5,
            )
        )
    return made or [Verdict("the gap rises without batch norm and falls with it", "too little was run", None)]


def draw(data: Json) -> Any:
    figure, axes = drawing.panels(2)
    for axis, network in zip(axes, NETWORKS, strict=True):
        for i, (norm, name) in enumerate(NORMS.items()):
            for curve in data["curves"]:
                if (curve["network"], curve["norm"]) == (network, norm):
                    x = range(1, len(curve["mean"]) + 1)
                    drawing.band(axis, x, curve["mean"], curve["std"], drawing.style(i, markers=False), name)
        axis.set_ylim(0, 1.02)
        axis.set_title(network, fontsize=10)
        axis.set_xlabel("hidden layer")
        axis.set_ylabel("orthogonality gap $V(H_l)$")
        drawing.whole_ticks(axis)
    drawing.legend(axes[0], loc="center right")
    return figure
