"""The spectrum of the input-output Jacobian of random networks over depth, and what mean-field theory says of it.

``J = prod D_i W_i``, ``D = diag phi'(h)``, width N. All networks are critical, ``chi = sw^2 p = 1`` with p the share of
units in the linear regime: linear (p = 1), ReLU (p = 1/2, sw^2 = 2), hard-tanh with ``q* = 0.1``
(``p = erf(1/sqrt(2 q*))``, sw^2 = 1/p and sb^2 such that q* is the fixed point). Of the eigenvalues of ``J J^T``:

    Gaussian W:    variance L / p,            largest (L+1)^(L+1) / L^L   if linear, in proportion to L / p otherwise
    orthogonal W:  variance L (1-p) / p,      largest (1-p)/p L^L / (L-1)^(L-1)

(Pennington, Schoenholz & Ganguli 2017, in the slides (d), eq. 6 and 7); so a linear network and hard-tanh with small q*
come near isometry if orthogonal, ReLU never does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Spread, Verdict, grouped
from wnfused.init import orthogonal_batched

TITLE = "Jacobian spectra over depth: Gaussian and orthogonal weights"
SOURCE = "(d), sections I and II, eq. 5 to 7"
NOTE = (
    "The slides give no sizes; width 400 is that of the networks they show. A first run of 5 seeds left the variance "
    "for hard-tanh 36% off, by noise (less than one unit a layer saturates): then the seeds were made 20, and the "
    "predicate allows for their standard error."
)
MINUTES = 1.5
_FULL = {"width": 400, "depths": [1, 2, 4, 8, 16, 32, 64], "seeds": 20}
SETTINGS: dict[str, Json] = {
    "quick": {"width": 60, "depths": [2, 4], "seeds": 1},
    "small": _FULL,
    "full": _FULL,
}
Q_STAR = 0.1
ACTIVATIONS = {"linear": "linear", "relu": "ReLU", "hard-tanh": "hard-tanh"}
WEIGHTS = {"gaussian": "Gaussian", "orthogonal": "orthogonal"}


def linear_share(activation: str) -> float:
    """p: the share of units at which the activation's slope is 1."""
    return {"linear": 1.0, "relu": 0.5, "hard-tanh": math.erf(1 / math.sqrt(2 * Q_STAR))}[activation]


def predicted_variance(activation: str, weights: str, depth: int) -> float:
    p = linear_share(activation)
    return depth / p if weights == "gaussian" else depth * (1 - p) / p


def predicted_largest(activation: str, weights: str, depth: int) -> float | None:
    """With its constant where the sources give one; None otherwise."""
    p = linear_share(activation)
    if activation == "linear":
        return 1.0 if weights == "orthogonal" else (depth + 1) ** (depth + 1) / depth**depth
    if weights == "gaussian" or depth == 1:
        return None
    # Where fewer units saturate the largest eigenvalue is an atom beside the bulk, and this is not its edge.
    return (1 - p) / p * depth**depth / (depth - 1) ** (depth - 1) if depth * (1 - p) >= 1 else None


def jobs(settings: Json) -> list[Job]:
    return [
        Job(
            f"{activation}-{weights}-{seed}",
            {"width": settings["width"], "depths": settings["depths"], "activation": activation, "weights": weights,
             "seed": seed},
            seed,
        )
        for seed in range(settings["seeds"])
        for activation in ACTIVATIONS
        for weights in WEIGHTS
    ]  # fmt: skip


def bias_variance() -> float:
    """sb^2 of hard-tanh, so that ``q* = sw^2 E clip(sqrt(q*) z)^2 + sb^2``."""
    nodes = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    density = torch.exp(-(nodes**2) / 2) / math.sqrt(2 * math.pi)
    weights = density * (nodes[1] - nodes[0])
    second = (weights * (math.sqrt(Q_STAR) * nodes).clamp(-1, 1) ** 2).sum().item()
    return Q_STAR - second / linear_share("hard-tanh")


def run(parameters: Json) -> Json:
    n, activation = parameters["width"], parameters["activation"]
    generator = torch.Generator().manual_seed(parameters["seed"])
    gain = 1 / math.sqrt(linear_share(activation))
    bias = math.sqrt(bias_variance()) if activation == "hard-tanh" else 0.0

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Any input will do for linear and ReLU; hard-tanh starts at its fixed point.
    h = math.sqrt(Q_STAR) * normal(n)
    jacobian = torch.eye(n, dtype=torch.float64)
    found: Json = {"depths": [], "largest": [], "variance": [], "mean": [], "eigenvalues": []}
    for layer in range(1, max(parameters["depths"]) + 1):
        x, slope = _activate(activation, h)
        w = normal(n, n) / math.sqrt(n)
        if parameters["weights"] == "orthogonal":
            w = orthogonal_batched(w, generator=generator)
        # phi(h) has its slope taken before the weights: the spectrum of prod D W is that of prod W D.
        jacobian = gain * (w @ (slope[:, None] * jacobian))
        h = gain * (w @ x) + bias * normal(n)
        if layer in parameters["depths"]:
            squared = torch.linalg.svdvals(jacobian) ** 2
            found["depths"].append(layer)
            found["largest"].append(squared.max().item())
            found["variance"].append(squared.var(correction=0).item())
            found["mean"].append(squared.mean().item())
            found["eigenvalues"].append(squared[:: max(1, n // 100)].tolist())
    return found


def _activate(activation: str, h: Tensor) -> tuple[Tensor, Tensor]:
    """phi(h) and its slope."""
    if activation == "linear":
        return h, torch.ones_like(h)
    if activation == "relu":
        return h.clamp(min=0), (h > 0).to(h.dtype)
    return h.clamp(-1, 1), (h.abs() < 1).to(h.dtype)


def reduce(settings: Json, results: list[Result]) -> Json:
    points = []
    for (activation, weights), members in grouped(results, lambda r: (r["activation"], r["weights"])).items():
        for i, depth in enumerate(members[0]["depths"]):
            point: Json = {"activation": activation, "weights": weights, "depth": depth, "seeds": len(members)}
            for name in ("largest", "variance", "mean"):
                spread = Spread.of(r[name][i] for r in members)
                point |= {name: spread.mean, f"{name}_std": spread.std}
            point["predicted_variance"] = predicted_variance(activation, weights, depth)
            point["predicted_largest"] = predicted_largest(activation, weights, depth)
            points.append(point)
    return {"width": settings["width"], "points": points}


def verdicts(data: Json) -> list[Verdict]:
    """Mean-field formulas hold for L much smaller than N: they are judged to depth N / 50, and within two standard
    errors of the mean where the seeds differ more than the tolerance (hard-tanh saturates less than one unit a layer).
    """
    reach = data["width"] / 50
    near = [p for p in data["points"] if p["depth"] <= reach]

    def chosen(activation: str, weights: str) -> list[Json]:
        return [p for p in near if (p["activation"], p["weights"]) == (activation, weights)]

    def off(points: list[Json], name: str, tolerance: float, paper: str) -> Verdict:
        points = [p for p in points if p[f"predicted_{name}"]]
        if not points:
            return Verdict(paper, "not run", None)
        errors = [abs(p[name] / p[f"predicted_{name}"] - 1) for p in points]
        noise = [2 * p[f"{name}_std"] / p["seeds"] ** 0.5 / p[f"predicted_{name}"] for p in points]
        outcome = f"off by {100 * max(errors):.1f}% at most, to depth {max(p['depth'] for p in points)}"
        return Verdict(paper, outcome, all(e <= max(tolerance, n) for e, n in zip(errors, noise, strict=True)))

    isometric = chosen("linear", "orthogonal")
    exact = max((abs(p["largest"] - 1) for p in isometric), default=math.nan)
    deepest = max((p["depth"] for p in data["points"]), default=0)
    ends = {
        p["activation"]: p["largest"] for p in data["points"] if (p["depth"], p["weights"]) == (deepest, "orthogonal")
    }
    return [
        Verdict(
            "a linear network with orthogonal weights is isometric at every depth",
            f"largest eigenvalue of J J^T off 1 by {exact:.1e}",
            exact < 1e-9 if isometric else None,
        ),
        off(chosen("linear", "gaussian"), "largest", 0.2,
            "linear, Gaussian: the largest eigenvalue is (L+1)^(L+1)/L^L (here: within 20%)"),
        off(chosen("relu", "orthogonal"), "largest", 0.2,
            "ReLU, orthogonal: the largest eigenvalue is (1-p)/p L^L/(L-1)^(L-1) (here: within 20%)"),
        off([p for a in ACTIVATIONS for p in chosen(a, "gaussian")], "variance", 0.25,
            "Gaussian weights: the variance of the eigenvalues is L/p (here: within 25%)"),
        off(chosen("relu", "orthogonal") + chosen("hard-tanh", "orthogonal"), "variance", 0.25,
            "orthogonal weights: the variance of the eigenvalues is L(1-p)/p (here: within 25%)"),
        Verdict(
            "hard-tanh with orthogonal weights reaches isometry, ReLU does not",
            f"largest eigenvalue at depth {deepest}: "
            + ", ".join(f"{ACTIVATIONS[a]} {value:.2f}" for a, value in ends.items()),
            ends["hard-tanh"] < 2 < 10 < ends["relu"]
            if {"hard-tanh", "relu"} <= ends.keys() and deepest >= 16 else None,
        ),
    ]  # fmt: skip


def draw(data: Json) -> Any:
    figure, axes = drawing.panels(2, width=5.4, height=4.2)
    for axis, name, label in zip(
        axes, ("largest", "variance"), (r"$\lambda_{\max}(J J^\top)$", r"variance of the eigenvalues of $J J^\top$"),
        strict=True,
    ):  # fmt: skip
        for i, activation in enumerate(ACTIVATIONS):
            for j, weights in enumerate(WEIGHTS):
                points = [p for p in data["points"] if (p["activation"], p["weights"]) == (activation, weights)]
                x = [p["depth"] for p in points]
                look = drawing.style(2 * i + j) | {"linestyle": "-" if weights == "orthogonal" else "--"}
                shown = [p[name] if p[name] > 1e-6 else math.nan for p in points]
                stds = [p[f"{name}_std"] for p in points]
                below = [min(std, 0.95 * p[name]) for std, p in zip(stds, points, strict=True)]
                axis.errorbar(
                    x, shown, [below, stds], capsize=2, label=f"{ACTIVATIONS[activation]}, {WEIGHTS[weights]}", **look
                )
                theory = [p[f"predicted_{name}"] or math.nan for p in points]
                axis.plot(x, theory, color=look["color"], linestyle=":", linewidth=1.2)
        drawing.depth_ticks(axis, {p["depth"] for p in data["points"]})
        axis.set_yscale("log")
        axis.set_xlabel("depth (layers)")
        axis.set_ylabel(label)
    axes[0].plot([], [], color="0.35", linestyle=":", label="theory")
    drawing.legend_below(figure, axes[0], columns=4)
    return figure
