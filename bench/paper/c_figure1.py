"""The angle between two samples over the layers of a random linear network, with batch norm and without.

Width 32, 50 layers, 20 runs. With batch norm the samples start nearly parallel (e_1 and .999 e_1 + .001 e_2),
without it orthogonal (e_1 and e_2).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from bench.paper import drawing
from bench.paper.chains import chain
from bench.paper.figure import Job, Json, Result, Verdict, number

TITLE = "Batch norm turns parallel samples orthogonal, a plain network orthogonal ones parallel"
SOURCE = "(c), Figure 1"
NOTE = "The paper's sizes in full, with 200 runs instead of 20."
MINUTES = 0.2
_FULL = {"width": 32, "layers": 50, "runs": 200}
SETTINGS: dict[str, Json] = {"quick": {"width": 32, "layers": 50, "runs": 20}, "small": _FULL, "full": _FULL}
KINDS = {"batch": "batch norm", "vanilla": "vanilla"}


def jobs(settings: Json) -> list[Job]:
    return [Job(kind, settings | {"kind": kind}) for kind in KINDS]


def run(parameters: Json) -> Json:
    normalised = parameters["kind"] == "batch"
    h = torch.zeros(parameters["width"], 2, dtype=torch.float64)
    h[0, 0] = 1.0
    h[:2, 1] = torch.tensor([0.999, 0.001]) if normalised else torch.tensor([0.0, 1.0])
    h = h.expand(parameters["runs"], -1, -1)
    states = chain(h, normalised, torch.Generator().manual_seed(0))
    cosines = [
        torch.nn.functional.cosine_similarity(state[..., 0], state[..., 1], dim=-1).abs()
        for state in itertools.islice(states, parameters["layers"] + 1)
    ]
    return {"mean": [number(c.mean()) for c in cosines], "std": [number(c.std()) for c in cosines]}


def reduce(settings: Json, results: list[Result]) -> Json:
    return {"curves": {r["kind"]: r.values for r in results}}


def verdicts(data: Json) -> list[Verdict]:
    curves = data["curves"]
    if len(curves) < len(KINDS):
        return [Verdict("|cos| falls with batch norm, rises without", "too little was run", None)]
    batch, vanilla = (curves[kind]["mean"] for kind in KINDS)
    return [
        Verdict(
            "with batch norm |cos| falls from 1 towards 0 over the layers",
            f"from {batch[0]:.2f} to {batch[-1]:.2f}",
            batch[-1] < 0.25,
        ),
        Verdict(
            "without it |cos| rises from 0 towards 1",
            f"from {vanilla[0]:.2f} to {vanilla[-1]:.2f}",
            vanilla[-1] > 0.5 and vanilla[-1] > vanilla[len(vanilla) // 4],
        ),
    ]


def draw(data: Json) -> Any:
    figure, (axis,) = drawing.panels(1, width=5.6)
    for i, (kind, name) in enumerate(KINDS.items()):
        curve = data["curves"].get(kind)
        if curve:
            drawing.band(
                axis, range(len(curve["mean"])), curve["mean"], curve["std"], drawing.style(i, markers=False), name
            )
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("layer")
    axis.set_ylabel(r"$|\cos|$ between the two samples")
    drawing.legend_below(figure, axis, columns=2)
    return figure
