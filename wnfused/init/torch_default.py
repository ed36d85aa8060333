"""``torch_default``: what PyTorch's weight norm starts from, ``g = ||v||``. The first baseline of the papers.

``v="orthogonal"`` (zero bias) is what the figures and tables of Arpit, Campos & Bengio (2019) use under this name, by
their published code; ``"he"`` the same with ``N(0, 2 / fan_in)``; ``"torch"`` is what ``nn.Conv2d`` and ``nn.Linear``
themselves draw, uniform in ``+- 1 / sqrt(fan_in)`` for weights and biases, with which signals shrink instead of
exploding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wnfused.init.layer import fill_directions_, reset_plain_
from wnfused.init.registry import Context, Entry, scheme
from wnfused.nn import WeightNormalised, WNResidualStage
from wnfused.nn._layer import row_norm


@scheme("torch_default")
def torch_default(context: Context, v: str = "orthogonal") -> Iterator[Entry]:
    """``v``: ``"orthogonal"``, ``"he"`` or ``"torch"``."""
    if v not in ("orthogonal", "he", "torch"):
        raise ValueError(f"v: unknown {v!r}; use 'orthogonal', 'he' or 'torch'")
    for role in context.roles:
        layer = role.layer
        if isinstance(layer, WNResidualStage):
            if layer.transition is not None:
                for part in (layer.transition.conv1, layer.transition.conv2, layer.transition.shortcut):
                    assert isinstance(part, WeightNormalised)
                    _reset(part.weight_v, part.weight_g, part._parameters["bias"], v, 0, part.dim, context.generator)
            _reset(layer.weight_v, layer.weight_g, layer.bias, v, 2, 0, context.generator)
            yield Entry(role.name, f"g = ||v||, {layer.num_blocks} blocks")
        elif isinstance(layer, WeightNormalised):
            _reset(layer.weight_v, layer.weight_g, layer._parameters["bias"], v, 0, layer.dim, context.generator)
            yield Entry(role.name, "g = ||v||")
        else:
            reset_plain_(layer, context.generator)
            yield Entry(role.name, "not weight-normalised: torch's default")


def _reset(
    weight_v: Tensor, weight_g: Tensor, bias: Tensor | None, kind: str, leading: int, dim: int | None,
    generator: torch.Generator | None,
) -> None:  # fmt: skip
    """Draws ``v`` and sets ``g = ||v||`` for one layer, or for a stack numbered by ``leading`` dims."""
    bound = 0.0
    if kind == "torch":
        bound = 1 / math.sqrt(max(math.prod(weight_v.shape[leading + 1 :]), 1))
        weight_v.uniform_(-bound, bound, generator=generator)
    else:
        fill_directions_(weight_v, kind, leading=leading, dim=dim, generator=generator)
    norms = row_norm(weight_v.flatten(0, leading) if leading else weight_v, 0 if leading else dim)
    weight_g.copy_(norms.reshape(weight_g.shape))
    if bias is not None:
        bias.uniform_(-bound, bound, generator=generator) if bound else bias.zero_()
