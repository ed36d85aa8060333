"""Norms of activations and gradients through weight-normalised networks at initialisation.

Top: 20 layers of random width with ReLU, 1,000 Gaussian inputs in R^500; left ``||h^l|| / ||x||``, right
``||dl/da^l|| / ||error||`` for a Gaussian error at the last layer's pre-activation. Bottom: 40 residual blocks
``h + FC2(relu(FC1(h)))``; left ``||h^b|| / ||x||``, right ``||dl/dh^b|| / ||dl/dh^B||``. Theory: the proposed gains
keep all of them, up to a factor ``(1 + 1/B)^(B/2)`` in ``[sqrt 2, sqrt e]`` for B blocks; with g = 1 squared norms
change by ``n_l / (2 n_{l-1})`` forward and 1/2 backward for each layer, by 3/2 for each block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bench.paper import drawing
from bench.paper.figure import Job, Json, Result, Verdict, all_known, grouped, number
from wnfused import WNLinear

TITLE = "Norms over the layers at initialisation"
SOURCE = "(a), Figure 1 and section 3"
NOTE = "The paper's sizes in full, averaged over seeds; bands are the standard deviation over the inputs."
MINUTES = 1.0
_FULL = {"inputs": 1000, "features": 500, "layers": 20, "blocks": 40, "widths": [200, 1000], "seeds": 5}
SETTINGS = {
    "quick": {"inputs": 20, "features": 50, "layers": 5, "blocks": 6, "widths": [60], "seeds": 1},
    "small": _FULL,
    "full": _FULL,
}
# Layers of the networks at the top have widths uniform in these many below and above (one less) the nominal one.
SPREAD = 50
INITS = {"he_g1": "He, g = 1", "orthogonal": "proposed, orthogonal", "he": "proposed, He"}
PROPOSED = ("orthogonal", "he")


def jobs(settings: Json) -> list[Job]:
    return [
        Job(
            f"{network}-{width}-{init}-{seed}",
            {key: settings[key] for key in ("inputs", "features", "layers", "blocks")}
            | {"network": network, "width": width, "init": init, "seed": seed},
            round=seed,
        )
        for seed in range(settings["seeds"])
        for network in ("mlp", "resnet")
        for width in settings["widths"]
        for init in INITS
    ]


def run(parameters: Json) -> Json:
    torch.manual_seed(parameters["seed"])
    x = torch.randn(parameters["inputs"], parameters["features"])
    forward, backward = {"mlp": _mlp, "resnet": _resnet}[parameters["network"]](parameters, x)
    return {"forward": _statistics(forward), "backward": _statistics(backward)}


def _layer(parameters: Json, n_in: int, n_out: int, gamma: float) -> WNLinear:
    """With the proposed gain, or with g = 1; directions and widths are the seed's."""
    layer = WNLinear(n_in, n_out, gamma=gamma, init="orthogonal" if parameters["init"] == "orthogonal" else "he")
    if parameters["init"] == "he_g1":
        torch.nn.init.ones_(layer.weight_g)
    return layer


def _mlp(parameters: Json, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    width, n = parameters["width"], x.shape[1]
    widths = torch.randint(width - SPREAD, width + SPREAD, (parameters["layers"],)).tolist()
    h, activations, sums = x, [x], []
    for n_out in widths:
        a = _layer(parameters, n, n_out, 2.0)(h)
        h, n = torch.relu(a), n_out
        sums.append(a)
        activations.append(h)
    error = torch.randn_like(sums[-1])
    gradients = torch.autograd.grad(sums[-1], sums, error)
    return _ratios(activations, x), _ratios(gradients, error)


def _resnet(parameters: Json, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    width, features, blocks = parameters["width"], x.shape[1], parameters["blocks"]
    states = [x.requires_grad_()]
    for _ in range(blocks):
        inner = torch.relu(_layer(parameters, features, width, 2.0)(states[-1]))
        states.append(states[-1] + _layer(parameters, width, features, 1 / blocks)(inner))
    error = torch.randn_like(x)
    gradients = torch.autograd.grad(states[-1], states, error)
    return _ratios(states, x), _ratios(gradients, error)


def _ratios(vectors: Any, reference: Tensor) -> list[Tensor]:
    """``||v_i|| / ||reference_i||`` for each of the vectors' rows."""
    return [v.detach().double().norm(dim=1) / reference.detach().double().norm(dim=1) for v in vectors]


def _statistics(ratios: list[Tensor]) -> Json:
    return {"mean": [number(r.mean()) for r in ratios], "std": [number(r.std()) for r in ratios]}


def reduce(settings: Json, results: list[Result]) -> Json:
    """For every network, width and init: mean over seeds of the curves."""
    curves = []
    for (network, width, init), members in grouped(results, lambda r: (r["network"], r["width"], r["init"])).items():
        curve = {"network": network, "width": width, "init": init, "seeds": len(members)}
        for side in ("forward", "backward"):
            for statistic in ("mean", "std"):
                columns = zip(*(r[side][statistic] for r in members), strict=True)
                curve[f"{side}_{statistic}"] = [sum(column) / len(column) for column in columns]
        curves.append(curve)
    return {"blocks": settings["blocks"], "layers": settings["layers"], "curves": curves}


def verdicts(data: Json) -> list[Verdict]:
    def curves(network: str, *inits: str) -> list[Json]:
        return [c for c in data["curves"] if c["network"] == network and c["init"] in inits]

    def judge(
        paper: str, network: str, side: str, at: int, ends_in: tuple[float, float], keeps: tuple[float, float], g1: Any
    ) -> Verdict:
        """The proposed curves stay within ``keeps`` and, at the far end ``at``, within ``ends_in``."""
        proposed, naive = curves(network, *PROPOSED), curves(network, "he_g1")
        ends = [c[f"{side}_mean"][at] for c in proposed]
        extremes = [v for c in proposed for v in c[f"{side}_mean"]]
        naive_ends = [c[f"{side}_mean"][at] for c in naive]
        kept = all(keeps[0] <= v <= keeps[1] for v in extremes) if proposed else None
        ended = all(ends_in[0] <= v <= ends_in[1] for v in ends)
        outcome = f"proposed {_span(ends)}, within {_span(extremes)} over all layers; g = 1 {_span(naive_ends)}"
        return Verdict(paper, outcome, all_known([kept, ended, *(g1(v) for v in naive_ends)]))

    # (1/sqrt 2)^(L - 1) for each layer passed and (3/2)^(B/2) are the closed forms with g = 1.
    fades = math.sqrt(0.5) ** (data["layers"] - 1) * 10
    grows = 1.5 ** (data["blocks"] / 2) / 10
    # 5% for a draw of finite width; on the way from 1 at the near end.
    band = (0.95 * math.sqrt(2), 1.05 * math.sqrt(math.e))
    way = (0.95, band[1])
    kept = (0.5, 2.0)
    return [
        judge("activations of the MLP keep their norm as proposed, vanish with g = 1",
              "mlp", "forward", -1, kept, kept, lambda v: v < fades),
        judge("gradients of the MLP keep their norm as proposed, vanish with g = 1",
              "mlp", "backward", 0, kept, kept, lambda v: v < fades),
        judge("activations of the ResNet grow by a factor in [1.41, 1.65] as proposed, explode with g = 1",
              "resnet", "forward", -1, band, way, lambda v: v > grows),
        judge("gradients of the ResNet grow by a factor in [1.41, 1.65] as proposed, explode with g = 1",
              "resnet", "backward", 0, band, way, lambda v: v > grows),
    ]  # fmt: skip


def _span(values: list[float]) -> str:
    if not values:
        return "nothing"
    return f"{min(values):.3g} to {max(values):.3g}" if len(values) > 1 else f"{values[0]:.3g}"


def draw(data: Json) -> Any:
    figure, axes = drawing.panels(2, 2)
    titles = (
        ("mlp", "forward", "MLP: activations", r"$\|h^l\| / \|x\|$", (0, 2)),
        ("mlp", "backward", "MLP: gradients", r"$\|\partial\ell/\partial a^l\| / \|error\|$", (0, 2)),
        ("resnet", "forward", "ResNet: activations", r"$\|h^b\| / \|x\|$", (0.9, 4)),
        ("resnet", "backward", "ResNet: gradients", r"$\|\partial\ell/\partial h^b\| / \|\partial\ell/\partial h^B\|$",
         (0.9, 4)),
    )  # fmt: skip
    widths = sorted({c["width"] for c in data["curves"]})
    for axis, (network, side, title, label, limits) in zip(axes, titles, strict=True):
        for c in data["curves"]:
            if c["network"] != network:
                continue
            look = drawing.style(list(INITS).index(c["init"]), markers=False)
            look["linestyle"] = drawing.DASHES[widths.index(c["width"])]
            first = 1 if (network, side) == ("mlp", "backward") else 0
            x = range(first, first + len(c[f"{side}_mean"]))
            name = f"{INITS[c['init']]}, width {c['width']}"
            drawing.band(axis, x, c[f"{side}_mean"], c[f"{side}_std"], look, name)
        if network == "resnet":
            axis.axhspan(math.sqrt(2), math.sqrt(math.e), color="0.85", zorder=0)
            axis.annotate(r"$[\sqrt{2}, \sqrt{e}]$", (0.45, 1.68), xycoords=("axes fraction", "data"), color="0.35")
        axis.set_ylim(*limits)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("layer" if network == "mlp" else "block")
        axis.set_ylabel(label)
        drawing.whole_ticks(axis)
    drawing.legend_below(figure, axes[0], columns=3)
    return figure
