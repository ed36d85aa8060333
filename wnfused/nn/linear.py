"""``WNLinear``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wnfused import functional
from wnfused.nn._geometry import sizes
from wnfused.nn._layer import WeightNormalised


class WNLinear(WeightNormalised, nn.Linear):
    """``y = act(x w^T + b)`` with ``w_i = g_i v_i / ||v_i||``: ``nn.Linear`` under weight normalisation, in one op.

    Args:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``; the dtype is float32, float64, float16 or
            bfloat16.
        activation: None, ``"relu"`` or ``"leaky_relu"`` (with ``negative_slope`` >= 0), applied in the same op.
        gamma: factor of the initial gain ``g = sqrt(gamma in_features / out_features)``; None for 2 before a ReLU,
            ``2 / (1 + negative_slope^2)`` before a leaky one, 1 otherwise.
        init: ``"orthogonal"`` or ``"he"`` directions.
        dim: dim of the weight that numbers the normalised rows; None for one norm over the whole weight.

    Parameters: ``weight_v [out_features, in_features]``, ``weight_g [out_features, 1]``, ``bias [out_features]``.

    Maps ``[*, in_features]`` to ``[*, out_features]``, in the input's dtype or autocast's; the input is in the dtype of
    the parameters, or in half precision with float32 ones.

    Raises:
        TypeError, ValueError: naming the argument that cannot work, its value and what is right. A device is torch's
            to refuse, with a RuntimeError.

    Source: Arpit, Campos & Bengio 2019, eq. 1, section 4.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        activation: str | None = None, negative_slope: float = 0.01, gamma: float | None = None,
        init: str = "orthogonal", dim: int | None = 0,
    ) -> None:  # fmt: skip
        self._set_options(activation, negative_slope, gamma, init, dim, bias, dtype)
        features = sizes(in_features=in_features, out_features=out_features)
        nn.Linear.__init__(self, **features, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(input w^T + b + residual)``; the residual, if any, has the output's shape.

        Args:
            input: ``[*, in_features]``, in the dtype of the parameters, or half precision with float32 ones.
        """
        if (form := self._frozen) is not None and self._runs_frozen(form, input):
            return self._frozen_output(form, input, residual)
        v, g, bias = self._v_g_bias()
        return functional.linear(
            input, v, g, bias,
            activation=self.activation, negative_slope=self.negative_slope, residual=residual, dim=self.dim,
        )  # fmt: skip
