"""``mishkin2016``: layer-sequential unit-variance initialisation, LSUV.

Orthonormal weights and zero biases; then, in order of execution, each linear or convolutional layer on its real input,
inside residual branches too: the weight (of a weight-normalised layer: its gains) is divided by the standard deviation
of the layer's output, over batch, space and units together, until ``|variance - 1| < tolerance``, at most ``steps``
times. Means are not shifted. The variance is that of the sample: of a few inputs, a rough one of all; 64 or more do.

Source: Mishkin & Matas 2016, "All you need is a good init", algorithm 1.
"""

from __future__ import annotations

import math

from torch import Tensor

from wnfused._numbers import above_0, positive
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.saxe2014 import start_orthogonal
from wnfused.init.units import Unit, fill_orthogonal_
from wnfused.init.walk import walk


@scheme("mishkin2016", needs_sample=True)
def mishkin2016(context: Context, tolerance: float = 0.1, steps: int = 10) -> list[Entry]:
    """``tolerance``: of the variance, above 0; ``steps``: at most, at least 1. Needs ``sample``, of 64 or more."""
    above_0(tolerance=tolerance)
    positive(steps=steps)
    fill_orthogonal_(context.units, generator=context.generator)
    for unit in context.units:
        start_orthogonal(unit)

    def visit(unit: Unit, x: Tensor) -> Entry:
        variance = to_unit_variance_(unit, x, tolerance, steps)
        if not abs(variance - 1) < tolerance:
            context.notes.append(f"{unit.shown}: its output's variance on the sample is {variance:.3g}, not 1")
        return Entry(unit.name, describe_unit(unit), None, unit.mean_gain())

    return walk(context, visit)


def to_unit_variance_(unit: Unit, x: Tensor, tolerance: float, steps: int) -> float:
    """The variance that the output has in the end; a constant output is left alone."""
    for step in range(steps + 1):
        variance = unit.pre_activation(x).double().var(correction=0).item()
        if abs(variance - 1) < tolerance or variance == 0 or step == steps:
            break
        unit.scale_(1 / math.sqrt(variance))
    return variance
