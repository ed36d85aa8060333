"""``xavier``: every layer's weight of variance ``gain^2 * 2 / (fan_in + fan_out)``, zero bias.

On a weight-normalised layer v is that matrix and g its row norms. Between keeping the variance forward (``1 / fan_in``)
and backward (``1 / fan_out``), for activations that are linear around 0; ``gain = sqrt(2)`` for a ReLU.

Source: Glorot & Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks", eq. 12, 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from wnfused._numbers import above_0
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit, draw_


@scheme("xavier")
def xavier(context: Context, gain: float = 1.0, distribution: str = "normal") -> Iterator[Entry]:
    """``gain``: factor on the standard deviation; ``distribution``: ``"normal"`` or ``"uniform"``."""
    above_0(gain=gain)
    for unit in context.units:
        draw_xavier_(unit, context, gain, distribution)
        yield Entry(unit.name, describe_unit(unit), None, unit.mean_gain())


def draw_xavier_(unit: Unit, context: Context, gain: float = 1.0, distribution: str = "normal") -> None:
    fans = max(unit.fan_in + unit.fan_out, 1)
    draw_(unit, gain * math.sqrt(2.0 / fans), distribution, generator=context.generator)
    unit.zero_bias_()
