"""``arpit2019``: the initialisation this package is built on.

    v orthogonal (or He),   b = 0,   g = sqrt(gamma * fan_in / fan_out),

gamma = 2 before a ReLU, ``1 / B_k`` for the last convolution of a block in a stage of ``B_k`` blocks, 1 otherwise, so
stem and shortcuts have 1; so have layers before other activations, for which the paper gives none. Then
``E ||h^l||^2`` is the same after every layer, and over a stage of residual blocks it grows by no more than e (theorems
1 and 3). An un-normalised head keeps torch's own default, as in the paper's published code; any other plain layer gets
the effective weight ``g_i v_i / ||v_i||`` of the same rule, so that a network without normalisation starts as the same
function.

Source: Arpit, Campos & Bengio 2019, "How to Initialize your Network?", end of sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from wnfused.init.layer import reset_plain_
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit, some_of
from wnfused.init.units import Unit, fill_


@scheme("arpit2019")
def arpit2019(context: Context, v: str = "orthogonal") -> Iterator[Entry]:
    """``v``: directions, ``"orthogonal"`` or ``"he"``."""
    fill_([unit for unit in context.units if not keeps_default(unit)], v, generator=context.generator)
    note_missing_gammas(context, context.units)
    for unit in context.units:
        yield plain_head(context, unit) if keeps_default(unit) else by_rule(unit)


def by_rule(unit: Unit) -> Entry:
    """``g = sqrt(gamma * fan_in / fan_out)`` and a zero bias, on directions that are there already."""
    gamma = unit.role.gamma
    gain = math.sqrt(gamma * unit.fan_ratio)
    unit.set_gain_(gain)
    unit.zero_bias_()
    words = describe_unit(unit) + (", for which there is no gamma" if _lacks_gamma(unit) else "")
    return Entry(unit.name, words, gamma, gain)


def note_missing_gammas(context: Context, units: Sequence[Unit]) -> None:
    """One note on those that are to follow the rule and are before an activation that it does not know."""
    names = [unit.name for unit in units if _lacks_gamma(unit)]
    if names:
        context.notes.append(
            f"before an activation for which the paper gives no gamma, taken as 1: {some_of(names)}; state one with "
            f"gammas={{{names[0]!r}: ...}}, which is 2 for a ReLU"
        )


def _lacks_gamma(unit: Unit) -> bool:
    """An activation after the head makes the model's output, whose size no later layer sees."""
    return bool(unit.role.without_gamma) and unit.role.stated is None and not unit.role.head


def is_plain_head(unit: Unit) -> bool:
    return unit.role.head and not unit.normalised


def keeps_default(unit: Unit) -> bool:
    """An un-normalised head, unless a gamma was stated for it; found is none, as nothing comes after a head."""
    return is_plain_head(unit) and unit.role.gamma == 1.0 and unit.role.stated is None


def plain_head(context: Context, unit: Unit) -> Entry:
    """Torch's own default for an un-normalised head."""
    reset_plain_(unit.module, context.generator)
    return Entry(unit.name, "head, not weight-normalised: torch's default", None, unit.mean_gain())
