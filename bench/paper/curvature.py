"""The Hessian's spectral norm of a network as its initialisation leaves it: one job of two tables."""

from __future__ import annotations

from bench.paper.figure import Json, number
from wnfused.diagnostics import hessian_norm
from wnfused.train import TrainConfig
from wnfused.train.build import build
from wnfused.train.data import load


def measured(network: Json, samples: int, batch_size: int | None, max_iterations: int) -> Json:
    """``network``: options of ``TrainConfig``; the first ``samples`` training images, in their own order.

    ``norm`` is None where the computation diverged.
    """
    config = TrainConfig.from_dict(network)
    data = load(config.data, config.seed)
    model = build(config, data)
    images = data.standardise(data.train.images[:samples])
    found = hessian_norm(
        model, images, data.train.labels[:samples], samples=samples, batch_size=batch_size,
        max_iterations=max_iterations,
    )  # fmt: skip
    return {"norm": number(found.norm), "converged": found.converged, "iterations": found.iterations}
