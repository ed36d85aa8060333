"""``half_scaling``: ``x <- sqrt(1/2) (x + F(x))``, with He weights.

Where He's weights double the variance with every residual block, the factor halves it again, at the price that what a
block saw fades exponentially on the way out. It is a change of the forward pass, which this package's blocks and
stages know as ``skip_scale``. It stays with the model until another scheme initialises it, which puts back what was
there before. Sums of blocks and stages that are left alone, since something else computes their weights, stay too.

Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.4, and Balduzzi et al. 2017, "The
Shattered Gradients Problem"; the baseline of Zhang, Dauphin & Ma 2019, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from wnfused._modules import quoted
from wnfused.init.he2015 import draw_he_
from wnfused.init.registry import Context, scheme
from wnfused.init.report import Entry, describe_unit
from wnfused.init.skip_scale import scale_sums_
from wnfused.nn import WNResidualStage


@scheme("half_scaling")
def half_scaling(context: Context) -> Iterator[Entry]:
    blocks = _scalable_blocks(context)
    for block in blocks:
        scale_sums_(block, math.sqrt(0.5))
    for unit in context.units:
        draw_he_(unit, context)
        scaled = ", sum times sqrt(1/2)" if unit.role.closes_branch else ""
        yield Entry(unit.name, describe_unit(unit) + scaled, None, unit.mean_gain())


def _scalable_blocks(context: Context) -> list[nn.Module]:
    """The modules that sum each residual branch.

    Raises:
        ValueError: naming a branch whose sum has no ``skip_scale``.
    """
    scalable = {
        id(layer): block
        for block in context.model.modules()
        if hasattr(block, "skip_scale")
        for layer in block.children()
    }
    found: list[nn.Module] = []
    for unit in (*context.units, *context.repeated):
        if not unit.role.closes_branch:
            continue
        block = unit.module if isinstance(unit.module, WNResidualStage) else scalable.get(id(unit.module))
        if block is None:
            raise ValueError(
                f"model: the residual branch that {quoted(unit.name)} closes has no skip_scale to set; half_scaling "
                "changes the forward pass and takes WNResidualBlock, WNResidualStage, PlainResidualBlock, or a block "
                "that multiplies its sum by an attribute skip_scale of its own"
            )
        found.append(block)
    return [*found, *_of_one_block(context.model, found)]


def _of_one_block(model: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    """Stages of a transition alone, which sum nothing themselves: their factor says what the transition's is."""
    stages = (m for m in model.modules() if isinstance(m, WNResidualStage))
    return [stage for stage in stages if stage.transition in found and not len(stage.weight_v)]
