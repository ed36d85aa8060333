"""``salimans2016``: pre-activations of mean 0 and variance 1 on one mini-batch, layer by layer.

In order of execution, each layer on its real input: orthogonal v, g = 1, b = 0, ``y = layer(x)``; with the mean mu and
the biased standard deviation sigma of every output unit over batch and space,

    g <- 1 / sigma,   b <- -mu / sigma,

and the re-computed output goes on. An un-normalised head keeps torch's default, as in the baseline of Arpit, Campos &
Bengio (2019); any other plain layer gets the same effective weight. A layer without a bias is only scaled.

Source: Salimans & Kingma 2016, "Weight Normalization", section 3, eq. 5 and 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wnfused.init.arpit2019 import is_plain_head, plain_head
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.units import Unit, fill_
from wnfused.init.walk import walk


@scheme("salimans2016", needs_sample=True)
def salimans2016(context: Context, v: str = "orthogonal") -> list[Entry]:
    """``v``: directions, ``"orthogonal"`` or ``"he"``. Needs ``sample``, of 64 or more."""
    fill_([unit for unit in context.units if not is_plain_head(unit)], v, generator=context.generator)
    for unit in context.units:
        if not is_plain_head(unit):
            unit.set_gain_(1.0)
            unit.zero_bias_()

    def visit(unit: Unit, x: Tensor) -> Entry:
        if is_plain_head(unit):
            return plain_head(context, unit)
        constant = standardise_(unit, x)
        if constant:
            context.notes.append(f"{unit.shown}: {constant} units are constant over the sample and keep g = 1")
        return Entry(unit.name, describe_unit(unit), None, unit.mean_gain())

    return walk(context, visit)


def standardise_(unit: Unit, x: Tensor) -> int:
    """``g <- g / sigma``, ``b <- (b - mu) / sigma``; how many units have no variance, and are only shifted."""
    y = unit.pre_activation(x)
    channel = y.dim() - 1 if isinstance(unit.module, torch.nn.Linear) else y.dim() - len(unit.kernel) - 1
    y = y.movedim(channel, 0).unsqueeze(-1).flatten(1).double()
    variance, mean = torch.var_mean(y, dim=1, correction=0)
    # What rounding leaves of a constant is no variance to scale by.
    rounding = torch.finfo(x.dtype).eps * y.abs().amax(1)
    constant = variance.sqrt() <= rounding
    scale = torch.where(constant, 1.0, variance.rsqrt())
    unit.scale_outputs_(scale)
    if unit.bias is not None:
        unit.bias.copy_((unit.bias.double() - mean) * scale)
    return int(constant.sum())
