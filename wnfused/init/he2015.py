"""``he``: every layer's weight drawn from ``N(0, gain^2 * 2 / fan_in)``, zero bias.

On a weight-normalised layer v is that matrix and g its row norms. The factor 2 makes up for the half of the signal
that a ReLU removes; without normalisation a residual network's variance then doubles with every block.

Source: He, Zhang, Ren & Sun 2015, "Delving Deep into Rectifiers", eq. 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from wnfused._numbers import above_0
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit, draw_


@scheme("he")
def he(context: Context, gain: float = 1.0, distribution: str = "normal") -> Iterator[Entry]:
    """``gain``: factor on the standard deviation; ``distribution``: ``"normal"`` or ``"uniform"``."""
    above_0(gain=gain)
    for unit in context.units:
        draw_he_(unit, context, gain, distribution)
        yield Entry(unit.name, describe_unit(unit), None, unit.mean_gain())


def draw_he_(unit: Unit, context: Context, gain: float = 1.0, distribution: str = "normal") -> None:
    draw_(unit, gain * math.sqrt(2.0 / max(unit.fan_in, 1)), distribution, generator=context.generator)
    unit.zero_bias_()
