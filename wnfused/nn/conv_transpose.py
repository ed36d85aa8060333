"""``WNConvTranspose1d/2d/3d``: torch's transposed convolutions under weight normalisation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wnfused._numbers import plain_int
from wnfused._spatial import Extent
from wnfused.nn._geometry import in_dims, transposed_geometry
from wnfused.nn._layer import WeightNormalised
from wnfused.ops._arguments import floating
from wnfused.ops.conv import conv_transpose


class _WNConvTranspose(WeightNormalised):
    """What the three ranks share."""

    residual_position = 2  # torch's own second argument is output_size
    _spatial: int
    _op: Callable[..., Tensor]  # not the public function, whose wrapper takes up to a microsecond

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Extent, stride: Extent = 1, padding: Extent = 0,
        output_padding: Extent = 0, groups: int = 1, bias: bool = True, dilation: Extent = 1,
        padding_mode: str = "zeros", device: Any = None, dtype: Any = None, *, activation: str | None = None,
        negative_slope: float = 0.01, gamma: float | None = None, init: str = "orthogonal", dim: int | None = 0,
    ) -> None:  # fmt: skip
        self._set_options(activation, negative_slope, gamma, init, dim, bias, dtype)
        given = transposed_geometry(
            self._spatial, in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups,
            padding_mode,
        )  # fmt: skip
        super().__init__(**given, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, output_size: list[int] | None = None, residual: Tensor | None = None) -> Tensor:
        """``act(conv_transpose(input, w) + b + residual)``; ``output_size`` settles the size as in torch's layer."""
        assert isinstance(self, nn.modules.conv._ConvTransposeNd)
        if (form := self._frozen) is not None and output_size is None and self._runs_frozen(form, input):
            return self._frozen_output(form, input, residual)
        assert not isinstance(self.padding, str)
        extra: Extent = self.output_padding
        if output_size is not None:
            floating("x", input)
            _check_output_size(output_size)
            extra = self._output_padding(
                input, output_size, list(self.stride), list(self.padding), list(self.kernel_size),
                len(self.kernel_size), list(self.dilation),
            )  # fmt: skip
        v, g, bias = self._v_g_bias()
        return type(self)._op(
            input, v, g, bias, self.stride, self.padding, extra, self.groups,
            self.dilation, activation=self.activation, negative_slope=self.negative_slope, residual=residual,
            dim=self.dim,
        )  # fmt: skip


def _check_output_size(output_size: object) -> None:
    """torch's own errors speak of anything but the argument."""
    if not isinstance(output_size, (list, tuple)) or not all(isinstance(plain_int(n), int) for n in output_size):
        kind = type(output_size).__name__ if not isinstance(output_size, (list, tuple)) else repr(output_size)
        hint = "; give a residual by its name, residual=..." if isinstance(output_size, Tensor) else ""
        raise TypeError(f"output_size: expected a list of ints, got {kind}{hint}")


class WNConvTranspose1d(_WNConvTranspose, nn.ConvTranspose1d):
    """``WNConvTranspose2d`` in one spatial dim: ``weight_v [C_in, C_out / groups, k]``."""

    _spatial = 1
    _op = staticmethod(functools.partial(conv_transpose, 1))


class WNConvTranspose2d(_WNConvTranspose, nn.ConvTranspose2d):
    """``y = act(conv_transpose2d(x, w) + b)``: ``nn.ConvTranspose2d`` under weight normalisation.

    As in torch's weight norm, ``dim=0`` numbers rows by *input* channels. The fan rule of Arpit et al. does not apply
    to such rows; the initial gain is ``g = sqrt(gamma prod(stride))``, which keeps the mean square per output element
    where ``C_in = C_out``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode:
            as in ``nn.ConvTranspose2d``, in its order.
        device, dtype: behind them, as there; float32, float64, float16 or bfloat16.
        activation, negative_slope, gamma, init, dim: as in ``WNConv2d``.

    Parameters: ``weight_v [C_in, C_out / groups, k_h, k_w]``, ``weight_g [C_in, 1, 1, 1]``, ``bias [C_out]``.

    Maps ``[N, C_in, H, W]`` to ``[N, C_out, H', W']``, or both without N, in the input's dtype or autocast's; the input
    is in the dtype of the parameters, or in half precision with float32 ones.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right. A device is torch's
            to refuse, with a RuntimeError.

    Source: Salimans & Kingma 2016, eq. 2, by rows as in ``torch.nn.utils.parametrizations.weight_norm``.
    """

    _spatial = 2
    _op = staticmethod(functools.partial(conv_transpose, 2))


class WNConvTranspose3d(_WNConvTranspose, nn.ConvTranspose3d):
    """``WNConvTranspose2d`` in three spatial dims."""

    _spatial = 3
    _op = staticmethod(functools.partial(conv_transpose, 3))


for _kind in (WNConvTranspose1d, WNConvTranspose3d):
    _kind.__doc__ = in_dims(_kind._spatial, WNConvTranspose2d.__doc__)
