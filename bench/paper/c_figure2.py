"""The orthogonality gap in random linear networks with batch norm: over depth, and at great depth over width.

Four nearly parallel samples. Left: widths 32 and 512, 50 layers, the logarithm of the gap. Right: widths 16 to 512, the
gap averaged over 500 layers. Theorem 1: it decays exponentially to a floor of order ``1 / sqrt width``.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from bench.paper import drawing
from bench.paper.chains import chain, nearly_parallel
from bench.paper.figure import Job, Json, Result, Verdict, grouped, slope
from wnfused.diagnostics import orthogonality_gap

TITLE = "The orthogonality gap over depth and over width"
SOURCE = "(c), Figure 2"
NOTE = "The paper's sizes in full."
MINUTES = 1.0
SAMPLES = 4
_FULL = {"depth": {"widths": [32, 512], "layers": 50}, "width": {"widths": [16, 32, 64, 128, 256, 512], "layers": 500},
         "runs": 20, "runs_a_job": 5}  # fmt: skip
SETTINGS: dict[str, Json] = {
    "quick": {
        "depth": {"widths": [32, 64], "layers": 50}, "width": {"widths": [16, 32, 64], "layers": 60}, "runs": 2,
        "runs_a_job": 2,
    },
    "small": _FULL,
    "full": _FULL,
}  # fmt: skip


def jobs(settings: Json) -> list[Job]:
    return [
        Job(
            f"{panel}-{width}-{part}",
            {"panel": panel, "width": width, "layers": settings[panel]["layers"], "runs": settings["runs_a_job"],
             "seed": part},
        )
        for part in range(settings["runs"] // settings["runs_a_job"])
        for panel in ("depth", "width")
        for width in settings[panel]["widths"]
    ]  # fmt: skip


def run(parameters: Json) -> Json:
    h = nearly_parallel(parameters["runs"], parameters["width"], SAMPLES).float()
    states = chain(h, True, torch.Generator().manual_seed(parameters["seed"]))
    gaps = torch.stack([orthogonality_gap(s) for s in itertools.islice(states, parameters["layers"] + 1)])
    if parameters["panel"] == "depth":
        return {"log_gap": gaps.log().T.tolist()}
    return {"mean_gap": gaps[1:].mean(0).tolist()}


def reduce(settings: Json, results: list[Result]) -> Json:
    over_depth, over_width = [], []
    for (panel, width), members in grouped(results, lambda r: (r["panel"], r["width"])).items():
        values = torch.tensor([run for r in members for run in r["log_gap" if panel == "depth" else "mean_gap"]])
        point = {"width": width, "runs": len(values), "mean": values.mean(0).tolist()}
        point["std"] = values.std(0).tolist()
        (over_depth if panel == "depth" else over_width).append(point)
    return {"depth": over_depth, "width": sorted(over_width, key=lambda p: p["width"])}


def fall(curve: list[float]) -> tuple[float, float, float]:
    """Rate and linearity (correlation with the layer) of the way down, and the floor, of a curve of ln V.

    The floor is the mean over the last fifth; the way down ends where the curve first comes within 1/2 of it.
    """
    floor = sum(curve[-len(curve) // 5 :]) / len(curve[-len(curve) // 5 :])
    end = next(i for i, v in enumerate(curve) if v <= floor + 0.5)
    way = torch.tensor([range(end + 1), curve[: end + 1]], dtype=torch.float64)
    return slope(range(end + 1), curve[: end + 1]), torch.corrcoef(way)[0, 1].item(), floor


def verdicts(data: Json) -> list[Verdict]:
    made = []
    falls = {p["width"]: fall(p["mean"]) for p in data["depth"]}
    floors = [floor for _, (_, _, floor) in sorted(falls.items())]
    made.append(
        Verdict(
            "ln V falls linearly for about 20 layers and then stays, lower for the larger width",
            "; ".join(f"width {w}: rate {r:.2f} a layer, correlation {c:.3f}, floor {f:.2f}"
                      for w, (r, c, f) in sorted(falls.items())),
            all(r < 0 and c < -0.95 for r, c, _ in falls.values()) and floors == sorted(floors, reverse=True)
            if len(falls) > 1 else None,
        )
    )  # fmt: skip
    points = data["width"]
    if len(points) > 1:
        found = slope([math.log(p["width"]) for p in points], [math.log(p["mean"]) for p in points])
        made.append(
            Verdict(
                "the gap at great depth falls with width with slope -0.46 in a log-log plot (theory: -1/2)",
                f"slope {found:.2f}",
                -0.55 <= found <= -0.4,
            )
        )
    return made


def draw(data: Json) -> Any:
    figure, (left, right) = drawing.panels(2)
    for i, p in enumerate(data["depth"]):
        look = drawing.style(i, markers=False)
        drawing.band(left, range(len(p["mean"])), p["mean"], p["std"], look, f"width {p['width']}")
    left.set_xlabel("layer")
    left.set_ylabel(r"$\ln V(H_l)$")
    drawing.legend(left)
    points = data["width"]
    if points:
        widths, means = [p["width"] for p in points], [p["mean"] for p in points]
        right.errorbar(widths, means, [p["std"] for p in points], capsize=3, label="mean gap", **drawing.style(0))
        right.plot(widths, [means[0] * (widths[0] / w) ** 0.5 for w in widths], color="0.35", linestyle=":",
                   label="slope -1/2")  # fmt: skip
        drawing.depth_ticks(right, widths)
        right.set_yscale("log")
        right.set_xlabel("width")
        right.set_ylabel("gap, mean over the layers")
        drawing.legend(right)
    return figure
