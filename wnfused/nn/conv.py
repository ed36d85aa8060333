"""``WNConv1d/2d/3d``: torch's convolutions under weight normalisation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wnfused._spatial import Extent
from wnfused.nn._geometry import geometry, in_dims
from wnfused.nn._layer import WeightNormalised
from wnfused.ops import _arguments as arguments
from wnfused.ops.conv import conv
from wnfused.reference import activate


class _WNConv(WeightNormalised):
    """What the three ranks share: torch's arguments in torch's order, then the options of this package."""

    _spatial: int
    _op: Callable[..., Tensor]  # not the public function, whose wrapper takes up to a microsecond
    # Whether a subclass has a ``_conv_forward`` of its own, which torch's layers call for the product.
    _has_own_product = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        definer = next((kind for kind in cls.__mro__ if "_conv_forward" in vars(kind)), nn.modules.conv._ConvNd)
        if definer.__module__ != nn.modules.conv.__name__:
            cls._has_own_product = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Extent, stride: Extent = 1,
        padding: Extent | str = 0, dilation: Extent = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", device: Any = None, dtype: Any = None, *, activation: str | None = None,
        negative_slope: float = 0.01, gamma: float | None = None, init: str = "orthogonal", dim: int | None = 0,
    ) -> None:  # fmt: skip
        self._set_options(activation, negative_slope, gamma, init, dim, bias, dtype)
        given = geometry(
            self._spatial, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode
        )
        super().__init__(**given, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(conv(input, w) + b + residual)``; the residual, if any, has the output's shape."""
        if self._has_own_product or "_conv_forward" in self.__dict__:
            return self._by_own_product(input, residual)
        if (form := self._frozen) is not None and self._runs_frozen(form, input):
            return self._frozen_output(form, input, residual)
        assert isinstance(self, nn.modules.conv._ConvNd)
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            if not arguments.has_override((input,)):
                arguments.floating("x", input)
                arguments.maps(input, self.in_channels, self._spatial)
            input, padding = _bordered(input, self), (0,) * len(self.kernel_size)
        v, g, bias = self._v_g_bias()
        return type(self)._op(
            input, v, g, bias, self.stride, padding, self.dilation, self.groups,
            activation=self.activation, negative_slope=self.negative_slope, residual=residual, dim=self.dim,
        )  # fmt: skip

    def _by_own_product(self, input: Tensor, residual: Tensor | None) -> Tensor:
        """By a ``_conv_forward`` of a subclass, or that somebody put on this very layer: torch's layers run it, too."""
        assert isinstance(self, nn.modules.conv._ConvNd)
        y: Tensor = self._conv_forward(input, self.weight, self.bias)
        if residual is not None:
            y = y + arguments.residual(residual, list(y.shape), y)
        return activate(y, self.activation or "none", self.negative_slope)


def _bordered(x: Tensor, layer: nn.modules.conv._ConvNd) -> Tensor:
    """``x`` with the border of the layer's padding mode."""
    border, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
    if torch.compiler.is_compiling():
        return nn.functional.pad(x, border, mode=mode)
    try:  # not looked at before, which takes 3 us a call, and in a trace adds guards
        return nn.functional.pad(x, border, mode=mode)
    except RuntimeError:
        least = _least_sizes(mode, border)
        sizes = list(x.shape[-len(least) :])
        if all(size >= n for size, n in zip(sizes, least, strict=True)):
            raise
        right = f"must be at least {least}, dim by dim, for padding {layer.padding!r} with padding_mode {mode!r}"
        raise ValueError(f"x: spatial size {sizes} {right}") from None


def _least_sizes(mode: str, border: list[int]) -> list[int]:
    """Of each spatial dim. ``border``: before and behind, the last dim first; below 0 where it crops."""
    pairs = list(zip(border[::2], border[1::2], strict=True))[::-1]
    taken = [{"reflect": max(pair) + 1, "circular": max(pair)}.get(mode, 1) for pair in pairs]
    return [max(1, least, 1 - sum(pair)) for least, pair in zip(taken, pairs, strict=True)]


class WNConv1d(_WNConv, nn.Conv1d):
    """``WNConv2d`` in one spatial dim: ``weight_v [C_out, C_in / groups, k]``, ``weight_g [C_out, 1, 1]``."""

    _spatial = 1
    _op = staticmethod(functools.partial(conv, 1))


class WNConv2d(_WNConv, nn.Conv2d):
    """``y = act(conv2d(x, w) + b)`` with ``w_i = g_i v_i / ||v_i||``: ``nn.Conv2d`` under weight normalisation.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            in ``nn.Conv2d``, in its order; the dtype is float32, float64, float16 or bfloat16.
        activation: None, ``"relu"`` or ``"leaky_relu"`` (with ``negative_slope`` >= 0), applied in the same op.
        gamma: factor of the initial gain ``g = sqrt(gamma fan_in / fan_out)``, with
            ``fan_in = prod(kernel_size) C_in`` and ``fan_out = prod(kernel_size) C_out``; None for 2 before a ReLU,
            ``2 / (1 + negative_slope^2)`` before a leaky one, 1 otherwise. A layer cannot see a *separate* ``nn.ReLU``
            after it: say ``gamma=2``.
        init: ``"orthogonal"`` or ``"he"`` directions.
        dim: dim of the weight that numbers the normalised rows; None for one norm over the whole weight.

    Parameters: ``weight_v [C_out, C_in / groups, k_h, k_w]``, ``weight_g [C_out, 1, 1, 1]``, ``bias [C_out]``.

    Maps ``[N, C_in, H, W]`` to ``[N, C_out, H', W']``, or both without N, in the input's dtype or autocast's; the input
    is in the dtype of the parameters, or in half precision with float32 ones.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right. A device is torch's
            to refuse, with a RuntimeError.

    Source: Arpit, Campos & Bengio 2019, eq. 1, section 4, footnote 3.
    """

    _spatial = 2
    _op = staticmethod(functools.partial(conv, 2))


class WNConv3d(_WNConv, nn.Conv3d):
    """``WNConv2d`` in three spatial dims: ``weight_v [C_out, C_in / groups, k, k, k]``."""

    _spatial = 3
    _op = staticmethod(functools.partial(conv, 3))


for _kind in (WNConv1d, WNConv3d):
    _kind.__doc__ = in_dims(_kind._spatial, WNConv2d.__doc__)
