"""``arpit2019``: the initialisation this package is built on.

    v orthogonal (or He),   b = 0,   g = sqrt(gamma * fan_in / fan_out),

gamma = 2 before a ReLU, ``1 / B_k`` for the last convolution of a block in a stage of ``B_k`` blocks, 1 otherwise, so
stem and shortcuts have 1. Then ``E ||h^l||^2`` is the same after every layer, and over a stage of residual blocks it
grows by no more than e (theorems 1 and 3). An un-normalised head keeps torch's own default, as in the paper's
published code; any other plain layer gets the effective weight ``g_i v_i / ||v_i||`` of the same rule, so that a
network without normalisation starts as the same function.

Source: Arpit, Campos & Bengio 2019, "How to Initialize your Network?", end of sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from wnfused.init.layer import reset_plain_
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit, fill_


@scheme("arpit2019")
def arpit2019(context: Context, v: str = "orthogonal") -> Iterator[Entry]:
    """``v``: directions, ``"orthogonal"`` or ``"he"``."""
    fill_([unit for unit in context.units if not is_plain_head(unit)], v, generator=context.generator)
    for unit in context.units:
        yield plain_head(context, unit) if is_plain_head(unit) else by_rule(unit)


def by_rule(unit: Unit) -> Entry:
    """``g = sqrt(gamma * fan_in / fan_out)`` and a zero bias, on directions that are there already."""
    gamma = unit.role.gamma
    gain = math.sqrt(gamma * unit.fan_ratio)
    unit.set_gain_(gain)
    unit.zero_bias_()
    return Entry(unit.name, describe_unit(unit), gamma, gain)


def is_plain_head(unit: Unit) -> bool:
    return unit.role.head and not unit.normalised


def plain_head(context: Context, unit: Unit) -> Entry:
    """Torch's own default for an un-normalised head."""
    reset_plain_(unit.module, context.generator)
    return Entry(unit.name, "head, not weight-normalised: torch's default", None, unit.mean_gain())
