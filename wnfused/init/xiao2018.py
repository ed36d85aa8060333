"""``xiao2018``: delta-orthogonal kernels, the convolutional counterpart of an orthogonal matrix.

A kernel is zero but for its centre tap, which is ``gain * Q`` with ``Q [c_out, c_in]`` of orthonormal columns,
Haar-distributed: the convolution with it is an isometry. It takes ``c_out >= c_in`` and an odd kernel; linear layers
are orthogonal. On a weight-normalised layer v is that kernel and g its row norms; rows of zero taps, where ``dim``
numbers those, have g = 0 and orthogonal directions. Biases are zero.

Source: Xiao, Bahri, Sohl-Dickstein, Schoenholz & Pennington 2018, "Dynamical Isometry and a Mean Field Theory of
CNNs", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wnfused._modules import quoted
from wnfused._numbers import above_0
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.saxe2014 import start_orthogonal
from wnfused.init.units import Unit, fill_orthogonal_
from wnfused.linalg import orthogonal_batched


@scheme("xiao2018")
def xiao2018(context: Context, gain: float = 1.0, otherwise: str = "orthogonal") -> Iterator[Entry]:
    """``gain``: of every isometry; ``otherwise``: what a convolution gets that cannot be delta-orthogonal,
    ``"orthogonal"`` (and the report says so) or ``"error"``."""
    above_0(gain=gain)
    if otherwise not in ("orthogonal", "error"):
        raise ValueError(f"otherwise: unknown {otherwise!r}; use 'orthogonal' or 'error'")
    obstacles = {id(unit): _obstacle(unit) for unit in context.units}
    for unit in context.units:
        reason = obstacles[id(unit)]
        if reason and otherwise == "error":
            raise ValueError(
                f"model: {quoted(unit.name)} cannot be delta-orthogonal: {reason}; say otherwise='orthogonal'"
            )
    plain = [unit for unit in context.units if not unit.kernel or obstacles[id(unit)]]
    fill_orthogonal_(plain, generator=context.generator)
    for unit in context.units:
        reason = obstacles[id(unit)]
        if reason:
            context.notes.append(f"{unit.shown}: orthogonal, not delta-orthogonal: {reason}")
        if reason or not unit.kernel:
            yield start_orthogonal(unit, gain)
        else:
            _fill_delta_(unit, gain, context.generator)
            unit.zero_bias_()
            yield Entry(unit.name, f"{describe_unit(unit)}; delta-orthogonal", None, unit.mean_gain())


def _obstacle(unit: Unit) -> str:
    """Why a convolution has no delta-orthogonal kernel; empty for one that has, and for a linear layer."""
    c_in, c_out = unit.channels
    if not unit.kernel:
        return ""
    if any(size % 2 == 0 for size in unit.kernel):
        return f"its kernel {list(unit.kernel)} has no centre"
    return f"it has {c_out} output channels for {c_in} input channels" if c_out < c_in else ""


def _fill_delta_(unit: Unit, gain: float, generator: torch.Generator | None) -> None:
    c_in, c_out = unit.channels
    count = len(unit.v) if unit.stacked else unit.groups
    isometries = orthogonal_batched(unit.v.new_empty(count, c_out, c_in), gain=gain, generator=generator)
    weight = torch.zeros_like(unit.v, memory_format=torch.contiguous_format)
    centre = weight
    for size in reversed(unit.kernel):
        centre = centre[..., size // 2]
    if unit.normalised and unit.dim is not None and unit.dim % len(unit.shape) >= 2:
        fill_orthogonal_([unit], generator=generator)  # what rows of zero taps keep
    # Groups lie one after the other along the first dim of a weight, which numbers inputs where it is transposed.
    centre.copy_((isometries.mT if unit.transposed else isometries).reshape(centre.shape))
    unit.set_weight_(weight)
