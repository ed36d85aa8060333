"""Fixup's scalars, in place of normalisation: a residual block with them, and a bias for outside of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wnfused._modules import check_module
from wnfused._numbers import counts, floating_dtype


def fixup_scalars(model: nn.Module) -> list[nn.Parameter]:
    """The scalar multipliers and biases of a model, in its order; the published code trains them at a tenth of the
    learning rate.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_module(model=model)
    holders = (module for module in model.modules() if isinstance(module, (FixupBlock, ScalarBias)))
    return [parameter for holder in holders for parameter in holder.parameters(recurse=False)]


class ScalarBias(nn.Module):
    """``x + b``, one b for all elements, which starts at 0: stands before a layer or an activation outside of blocks.

    Parameter: ``bias [1]``. Raises TypeError on a ``dtype`` that the layers do not have.

    Source: Zhang, Dauphin & Ma 2019, section 3, rule 3.
    """

    def __init__(self, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        floating_dtype(dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    @torch.no_grad()
    def reset_scalars(self) -> None:
        """Bias 0."""
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class FixupBlock(nn.Module):
    """``relu(shortcut(x) + m conv2(relu(conv1(x + b1) + b2) + b3) + b4)``, with scalars m and b1 to b4.

    The convolutions are plain, 3x3 and without biases of their own. Where shapes change the shortcut is a 1x1
    convolution of ``x + b1``, otherwise the identity. The scalars start at 1 and 0 and the last convolution at 0, so
    that the block starts as ``relu(shortcut(x))``.

    Args:
        in_channels, out_channels, stride: of the block; the first convolution has the stride.
        num_branches: L, how many residual branches the network has: the first convolution starts as He's times
            ``L^(-1/2)``. ``wnfused.init.initialize(model, "zhang2019")`` counts them itself.
        device, dtype: of the parameters, as in ``nn.Conv2d``.

    Parameters: ``scale`` and ``bias1`` to ``bias4``, each ``[1]``, beside those of ``conv1``, ``conv2``, ``shortcut``.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right.

    Source: Zhang, Dauphin & Ma 2019, figure 1 (right) and section 3.
    """

    bias1: Tensor
    bias2: Tensor
    bias3: Tensor
    bias4: Tensor
    scale: Tensor

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, *, num_branches: int = 1,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        in_channels, out_channels, stride, num_branches = counts(
            in_channels=in_channels, out_channels=out_channels, stride=stride, num_branches=num_branches
        )
        floating_dtype(dtype=dtype)
        self.num_branches = num_branches
        where = {"device": device, "dtype": dtype}
        for name in ("bias1", "bias2", "bias3", "bias4", "scale"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, **where)))
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False, **where)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False, **where)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False, **where)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """He's weights, the first convolution's times ``num_branches^(-1/2)``, the last one's 0; the scalars."""
        self.reset_scalars()
        for conv in (self.conv1, self.shortcut):
            if isinstance(conv, nn.Conv2d):
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        self.conv1.weight.mul_(self.num_branches**-0.5)
        self.conv2.weight.zero_()

    @torch.no_grad()
    def reset_scalars(self) -> None:
        """Multiplier 1, biases 0."""
        for bias in (self.bias1, self.bias2, self.bias3, self.bias4):
            bias.zero_()
        self.scale.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, in_channels, H, W]`` to ``[N, out_channels, H / stride, W / stride]``, sizes rounded up."""
        shifted = x + self.bias1
        y = self.relu(self.conv1(shifted) + self.bias2)
        y = self.conv2(y + self.bias3) * self.scale
        shortcut: Tensor = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(shifted)
        return self.relu(y + shortcut + self.bias4)
