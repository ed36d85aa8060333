"""``arpit2019``: the initialisation this package is built on.

    v orthogonal (or He),   b = 0,   g = sqrt(gamma * fan_in / fan_out),

gamma = 2 before a ReLU, ``1 / B_k`` for the last convolution of a block in a stage of ``B_k`` blocks, 1 otherwise, so
stem and shortcuts have 1. Then ``E ||h^l||^2`` is the same after every layer, and over a stage of residual blocks it
grows by no more than e (theorems 1 and 3). The un-normalised head keeps torch's own default.

Source: Arpit, Campos & Bengio 2019, "How to Initialize your Network?", end of sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator

from wnfused.init.layer import reset_layer_, reset_plain_, reset_stage_
from wnfused.init.registry import Context, Entry, describe, scheme
from wnfused.nn import WeightNormalised, WNResidualStage


@scheme("arpit2019")
def arpit2019(context: Context, v: str = "orthogonal") -> Iterator[Entry]:
    """``v``: directions, ``"orthogonal"`` or ``"he"``."""
    if v not in ("orthogonal", "he"):
        raise ValueError(f"v: unknown {v!r}; use 'orthogonal' or 'he'")
    for role in context.roles:
        layer = role.layer
        if isinstance(layer, WNResidualStage):
            yield from initialize_stage(context, role.name, layer, v)
        elif isinstance(layer, WeightNormalised):
            gain = reset_layer_(layer, gamma=role.gamma, kind=v, generator=context.generator)
            yield Entry(role.name, describe(role), role.gamma, gain)
        else:
            reset_plain_(layer, context.generator)
            yield Entry(role.name, "not weight-normalised: torch's default")


def initialize_stage(context: Context, name: str, stage: WNResidualStage, v: str) -> Iterator[Entry]:
    """The transition block, then all identity blocks at once."""
    blocks = stage.num_blocks
    if stage.transition is not None:
        transition = stage.transition
        for part, gamma in (("conv1", 2.0), ("conv2", 1 / blocks), ("shortcut", 1.0)):
            layer = getattr(transition, part)
            gain = reset_layer_(layer, gamma=gamma, kind=v, generator=context.generator)
            yield Entry(f"{name}.transition.{part}", "transition block", gamma, gain)
    if len(stage.weight_v):
        gains = reset_stage_(stage, kind=v, generator=context.generator)
        for i, gamma in enumerate((2.0, 1 / blocks)):
            role = ("before a ReLU", "last of branch")[i]
            entry = f"{name}.weight_v[:, {i}]"
            yield Entry(entry, f"{role}, {len(stage.weight_v)} blocks of {blocks}", gamma, gains[i])
