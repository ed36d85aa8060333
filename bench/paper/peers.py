"""The networks that (b) compares, by the name of their method: WRN of width 1 without normalisation, and with it.

Batch norm is the literature's pre-activation network, normalised once more after the stem and before the pooling: the
twin of ``resnet``, whose depth 6n + 2 leaves the two 1x1 shortcuts out that a WRN's 6n + 4 counts.
"""

from __future__ import annotations

from bench.paper.figure import Json

# name: normalisation, scheme
METHODS = {
    "He": ("none", "he"),
    "1/2-scaling": ("none", "half_scaling"),
    "LSUV": ("none", "mishkin2016"),
    "batch norm": ("batch", "he"),
    "ZeroInit": ("fixup", "zhang2019"),
}


def network(method: str, depth: int) -> Json:
    """Options of ``TrainConfig`` for a network of ``depth`` = 6n + 4 layers."""
    norm, init = METHODS[method]
    if norm == "batch":
        return {"model": "resnet", "depth": depth - 2, "norm": norm, "init": init}
    return {"model": "wrn", "depth": depth, "norm": norm, "init": init}


def file_name(method: str) -> str:
    """The method's name as part of a job's."""
    return method.replace("/", "").replace(" ", "")
