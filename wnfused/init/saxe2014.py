"""``orthogonal``: every layer's weight, as ``[rows, rest]``, a Haar-distributed orthogonal matrix times ``gain``.

Orthonormal rows where there are fewer rows than columns, orthonormal columns otherwise; zero bias. On a
weight-normalised layer v is that matrix and g its row norms.

Source: Saxe, McClelland & Ganguli 2014, "Exact solutions to the nonlinear dynamics of learning in deep linear neural
networks", section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from wnfused._numbers import above_0
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit, fill_orthogonal_


@scheme("orthogonal")
def orthogonal(context: Context, gain: float = 1.0) -> Iterator[Entry]:
    """``gain``: of every matrix."""
    above_0(gain=gain)
    fill_orthogonal_(context.units, generator=context.generator)
    for unit in context.units:
        yield start_orthogonal(unit, gain)


def start_orthogonal(unit: Unit, gain: float = 1.0) -> Entry:
    """``w <- gain * v``, with v filled already, and a zero bias."""
    unit.set_weight_(unit.v * gain)
    unit.zero_bias_()
    return Entry(unit.name, describe_unit(unit), None, unit.mean_gain())
