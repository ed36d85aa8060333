"""Convolutions whose weights do not change, on weights that the C++ kernels packed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wnfused.ops._direct import CODES, is_open


def kept_conv(
    transposed: bool, x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None,
    banks: list[Tensor], geometry: tuple[Any, ...], activation: str | None, negative_slope: float,
) -> Tensor | None:  # fmt: skip
    """``y`` of a convolution; None where the layer has to be run as always: see ``wnfused.frozen``.

    Args:
        banks: what calls before this one packed of these very ``v``, ``g`` and ``bias``; this one may add to it.
        geometry: stride, padding, dilation, of a transposed one output_padding, and groups, as a layer has them.
    """
    recorded = torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad))
    if recorded or x.dim() != v.dim() or not is_open(x, v, g, bias, residual):
        return None
    ops = torch.ops.wnfused_native
    op = ops.kept_conv_transpose if transposed else ops.kept_conv
    try:
        y, bank = op.default._op(
            x, v, g, bias, residual, list(banks), *geometry, CODES[activation], negative_slope
        )  # fmt: skip
    except (RuntimeError, TypeError):
        return None  # run as always, the layer says which argument does not fit
    if bank is not None:
        banks.append(bank)
    result: Tensor | None = y
    return result
