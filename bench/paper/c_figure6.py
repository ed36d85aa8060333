"""The gap to the stationary Gram matrix over width, for batch norm after several activations.

``Q_{l+1} = BN(W F(Q_l))``, four samples; ``L = || Q^T Q / d - E[Q^T Q / d] ||_F``, the expectation over 5,000 layers, L
averaged over 1,000. Conjectured: of order ``1 / sqrt d`` whatever F. The published code's "sigmoid" is ``tanh + 1``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from bench.paper import drawing
from bench.paper.chains import batch_norm, chain
from bench.paper.figure import Job, Json, Result, Verdict, slope
from wnfused.diagnostics import stationary_gap

TITLE = "The gap to the stationary state over width, for several activations"
SOURCE = "(c), Figure 6 and appendix F"
NOTE = "The paper's sizes in full."
MINUTES = 1.0
SAMPLES = 4
_FULL = {"widths": [16, 32, 64, 128, 256], "layers": 5000, "averaged": 1000, "runs": 4}
SETTINGS: dict[str, Json] = {
    "quick": {"widths": [16, 32, 64], "layers": 150, "averaged": 50, "runs": 2},
    "small": _FULL,
    "full": _FULL,
}
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "sin": torch.sin, "tanh+1": lambda x: torch.tanh(x) + 1}


def jobs(settings: Json) -> list[Job]:
    shared = {key: settings[key] for key in ("layers", "averaged", "runs")}
    return [
        Job(f"{name}-{width}", shared | {"activation": name, "width": width})
        for width in settings["widths"]
        for name in ACTIVATIONS
    ]


def run(parameters: Json) -> Json:
    width, generator = parameters["width"], torch.Generator().manual_seed(0)
    # Entries of order 1, as the published code has them: rows of norm sqrt n.
    scale = SAMPLES**0.5
    activation = ACTIVATIONS[parameters["activation"]]
    h = batch_norm(torch.randn(parameters["runs"], width, SAMPLES, generator=generator))
    states = chain(h, True, generator, lambda q: activation(scale * q))
    expected = torch.zeros(SAMPLES, SAMPLES, dtype=torch.float64)
    kept = []
    for i, state in enumerate(itertools.islice(states, 1, parameters["layers"] + 1)):
        q = scale * state.double()
        expected += (q.mT @ q / width).mean(0)
        if i >= parameters["layers"] - parameters["averaged"]:
            kept.append(q)
    gaps = stationary_gap(torch.stack(kept), expected / parameters["layers"]).mean(0)
    return {"gap": gaps.mean().item(), "std": gaps.std().item()}


def reduce(settings: Json, results: list[Result]) -> Json:
    points = [{"activation": r["activation"], "width": r["width"], "gap": r["gap"], "std": r["std"]} for r in results]
    return {"points": sorted(points, key=lambda p: p["width"])}


def verdicts(data: Json) -> list[Verdict]:
    curves = {a: [(p["width"], p["gap"]) for p in data["points"] if p["activation"] == a] for a in ACTIVATIONS}
    slopes = {
        a: slope([math.log(w) for w, _ in curve], [math.log(g) for _, g in curve])
        for a, curve in curves.items()
        if len(curve) > 1
    }
    common = set.intersection(*({w for w, _ in curve} for curve in curves.values()))
    apart = max((max(of) / min(of) for w in common if (of := [dict(c)[w] for c in curves.values()])), default=math.nan)
    return [
        Verdict(
            "the gap falls as 1/sqrt width for every activation",
            "slopes " + ", ".join(f"{a} {s:.2f}" for a, s in slopes.items()),
            all(-0.65 <= s <= -0.4 for s in slopes.values()) if len(slopes) == len(ACTIVATIONS) else None,
        ),
        Verdict(
            "the curves of the activations coincide (here: within a factor of 2)",
            f"at most a factor of {apart:.2f} apart",
            apart <= 2 if common else None,
        ),
    ]


def draw(data: Json) -> Any:
    figure, (axis,) = drawing.panels(1, width=5.6)
    for i, name in enumerate(ACTIVATIONS):
        points = [p for p in data["points"] if p["activation"] == name]
        axis.errorbar(
            [p["width"] for p in points], [p["gap"] for p in points], [p["std"] for p in points], capsize=3,
            label=name, **drawing.style(i),
        )  # fmt: skip
    widths = sorted({p["width"] for p in data["points"]})
    start = max(p["gap"] for p in data["points"] if p["width"] == widths[0])
    axis.plot(widths, [start * (widths[0] / w) ** 0.5 for w in widths], color="0.35", linestyle=":", label="slope -1/2")
    drawing.depth_ticks(axis, widths)
    axis.set_yscale("log")
    axis.set_xlabel("width")
    axis.set_ylabel(r"$\|Q^\top Q/d - \mathrm{E}[Q^\top Q/d]\|_F$")
    drawing.legend(axis)
    return figure
