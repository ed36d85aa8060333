"""``WNConv2d``."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from wnfused import functional
from wnfused.nn._layer import WeightNormalised


class WNConv2d(WeightNormalised, nn.Conv2d):
    """``y = act(conv2d(x, w) + b)`` with ``w_i = g_i v_i / ||v_i||``: ``nn.Conv2d`` under weight normalisation.

    Args:
        in_channels ... dtype: as in ``nn.Conv2d``, in its order.
        activation: None, ``"relu"`` or ``"leaky_relu"`` (with ``negative_slope`` >= 0), applied in the same op.
        gamma: factor of the initial gain ``g = sqrt(gamma fan_in / fan_out)``, with ``fan_in = k k c_in`` and
            ``fan_out = k k c_out``; None for 2 before a ReLU, ``2 / (1 + negative_slope^2)`` before a leaky one,
            1 otherwise. A layer cannot see a *separate* ``nn.ReLU`` after it: say ``gamma=2``.
        init: ``"orthogonal"`` or ``"he"`` directions.
        dim: dim of the weight that numbers the normalised rows.

    Parameters: ``weight_v [C_out, C_in / groups, k, k]``, ``weight_g [C_out, 1, 1, 1]``, ``bias [C_out]``.

    Source: Arpit, Campos & Bengio 2019, eq. 1, section 4, footnote 3.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1, padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1, groups: int = 1, bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None, dtype: Any = None, *, activation: str | None = None, negative_slope: float = 0.01,
        gamma: float | None = None, init: str = "orthogonal", dim: int | None = 0,
    ) -> None:  # fmt: skip
        self._set_options(activation, negative_slope, gamma, init, dim)
        nn.Conv2d.__init__(
            self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype,
        )  # fmt: skip

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(conv2d(input, w) + b + residual)``; the residual, if any, has the output's shape."""
        if self._runs_frozen():
            return self._frozen_output(input, residual)
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            border = self._reversed_padding_repeated_twice
            input, padding = torch.nn.functional.pad(input, border, mode=self.padding_mode), 0
        return functional.conv2d(
            input, self.weight_v, self.weight_g, self.bias, self.stride, padding, self.dilation, self.groups,
            activation=self.activation, negative_slope=self.negative_slope,
            residual=residual, dim=self.dim,
        )  # fmt: skip
