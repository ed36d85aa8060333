"""``torch_default``: what PyTorch's weight norm starts from, ``g = ||v||``. The first baseline of the papers.

``v="orthogonal"`` (zero bias) is what the figures and tables of Arpit, Campos & Bengio (2019) use under this name, by
their published code; ``"he"`` the same with ``N(0, 2 / fan_in)``; ``"torch"`` is what ``nn.Conv2d`` and ``nn.Linear``
themselves draw, uniform in ``+- 1 / sqrt(fan_in)`` for weights and biases, with which signals shrink instead of
exploding. Plain layers get torch's own draw in every case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from wnfused.init.layer import reset_plain_
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import fill_


@scheme("torch_default")
def torch_default(context: Context, v: str = "orthogonal") -> Iterator[Entry]:
    """``v``: ``"orthogonal"``, ``"he"`` or ``"torch"``."""
    if v not in ("orthogonal", "he", "torch"):
        raise ValueError(f"v: unknown {v!r}; use 'orthogonal', 'he' or 'torch'")
    normalised = [unit for unit in context.units if unit.normalised]
    if v != "torch":
        fill_(normalised, v, generator=context.generator)
    for unit in context.units:
        if not unit.normalised:
            reset_plain_(unit.module, context.generator)
            yield Entry(unit.name, "not weight-normalised: torch's default", None, unit.mean_gain())
            continue
        unit.zero_bias_()
        if v == "torch":
            # torch takes the fan from the weight's second dim on, transposed or not.
            bound = 1 / math.sqrt(max(math.prod(unit.shape[1:]), 1))
            unit.v.uniform_(-bound, bound, generator=context.generator)
            if unit.bias is not None:
                unit.bias.uniform_(-bound, bound, generator=context.generator)
        unit.set_weight_(unit.v)
        yield Entry(unit.name, f"{describe_unit(unit)}; g = ||v||", None, unit.mean_gain())
