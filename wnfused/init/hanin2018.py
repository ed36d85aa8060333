"""``hanin2018``: residual branches fade with their place, stage by stage.

As ``arpit2019``, but the last layer of block b, counted from 1 within its stage, has the gain

    g = factor^b,   factor = 0.9,

itself, without fans: the norm of a filter. Rows along another dim than 0 share the norm that all filters have together,
as in ``arpit2019``. The squared norm over a stage grows by at most ``prod_b (1 + factor^(2 b))``, below 36 for 0.9
however many blocks there are.

Source: Hanin & Rolnick 2018, "How to Start Training: The Effect of Initialization and Architecture", theorem 6; stage
by stage as the baseline of Arpit, Campos & Bengio 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from wnfused._numbers import number
from wnfused.init.arpit2019 import by_rule, keeps_default, note_missing_gammas, plain_head
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit, fill_


@scheme("hanin2018")
def hanin2018(context: Context, v: str = "orthogonal", factor: float = 0.9) -> Iterator[Entry]:
    """``v``: directions, ``"orthogonal"`` or ``"he"``; ``factor``: of one block to the next, above 0, at most 1."""
    number(factor=factor)
    if not 0 < factor <= 1:
        raise ValueError(f"factor: {factor} must be above 0 and at most 1")
    fill_([unit for unit in context.units if not keeps_default(unit)], v, generator=context.generator)
    note_missing_gammas(context, [unit for unit in context.units if not _fades(unit)])
    for unit in context.units:
        if keeps_default(unit):
            yield plain_head(context, unit)
        elif _fades(unit):
            _fade(unit, factor)
            yield Entry(unit.name, f"{describe_unit(unit)}: {factor:g}^b", None, unit.mean_gain())
        else:
            yield by_rule(unit)


def _fades(unit: Unit) -> bool:
    return unit.role.closes_branch and not unit.role.by_hand


def _fade(unit: Unit, factor: float) -> None:
    if unit.stacked:
        assert unit.g is not None
        blocks = torch.arange(unit.role.block, unit.role.block + len(unit.v), dtype=torch.float64)
        unit.g.copy_((factor**blocks).unsqueeze(1).expand_as(unit.g))
    else:
        unit.set_gain_(factor**unit.role.block * math.sqrt(_filters_per_row(unit)))
    unit.zero_bias_()


def _filters_per_row(unit: Unit) -> float:
    rows = 1 if unit.dim is None else unit.shape[unit.dim]
    return unit.shape[0] / rows if unit.dim != 0 else 1.0
