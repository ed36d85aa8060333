"""Convolutions whose weights do not change, on weights that the C++ kernels packed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wnfused.ops._arguments import autocast, below_autocast
from wnfused.ops._direct import is_open


def kept_kernel(transposed: bool) -> Callable[..., Any]:
    """The op of ``kept_conv``, below torch.ops' own Python wrapper."""
    ops = torch.ops.wnfused_native
    op: Callable[..., Any] = (ops.kept_conv_transpose if transposed else ops.kept_conv).default._op
    return op


def kept_conv(
    kernel: Callable[..., Any], x: Tensor, weights: tuple[Tensor, Tensor, Tensor | None], residual: Tensor | None,
    banks: list[Tensor], constants: tuple[Any, ...],
) -> Tensor | None:  # fmt: skip
    """``y`` of a convolution; None where the layer has to be run as always: see ``wnfused.frozen``.

    Args:
        weights: v, g and bias.
        banks: what calls before this one packed of these very weights; this one may add to it.
        constants: stride, padding, dilation, of a transposed one output_padding, and groups, as a layer has them; the
            activation's number (``wnfused.ops._direct.CODES``) and its slope.
    """
    v, g, bias = weights
    recorded = torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad))
    if recorded or x.dim() != v.dim() or not is_open(x, v, g, bias, residual):
        return None
    try:
        residual = None if residual is None else autocast(residual)
        y, bank = below_autocast(kernel, autocast(x), v, g, bias, residual, banks, *constants)
    except (RuntimeError, TypeError):
        return None  # run as always, the layer says which argument does not fit
    if bank is not None:
        banks.append(bank)
    result: Tensor | None = y
    return result
