"""Convolutions whose weights do not change, on weights that the C++ kernels packed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wnfused.ops._arguments import autocast, below_autocast
from wnfused.ops._direct import by_entry, is_open


def kept_kernel(name: str) -> Callable[..., Any]:
    """The op ``kept_conv`` or ``kept_conv_transpose``, below torch.ops' own Python wrapper."""
    op: Callable[..., Any] = getattr(torch.ops.wnfused_native, name).default._op
    return op


def kept_conv(
    name: str, kernel: Callable[..., Any], x: Tensor, weights: tuple[Tensor, Tensor, Tensor | None],
    residual: Tensor | None, banks: list[Tensor], constants: tuple[Any, ...],
) -> Tensor | None:  # fmt: skip
    """``y`` of a convolution; None where the layer has to be run as always: see ``wnfused.frozen``.

    Args:
        name, kernel: of the op, and ``kept_kernel`` of it.
        weights: v, g and bias.
        banks: what calls before this one packed of these very weights; this one may add to it.
        constants: stride, padding, dilation, of a transposed one output_padding, and groups, as a layer has them; the
            activation's number (``wnfused.ops._direct.CODES``) and its slope.
    """
    v, g, bias = weights
    try:
        y: Tensor | None = by_entry(name, x, v, g, bias, residual, banks, *constants)
    except RuntimeError:
        return None  # run as always, the layer says which argument does not fit
    if y is not None:
        return y
    recorded = torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad))
    if recorded or x.dim() != v.dim() or not is_open(x, v, g, bias, residual):
        return None
    try:
        residual = None if residual is None else autocast(residual)
        y, bank = below_autocast(kernel, autocast(x), v, g, bias, residual, banks, *constants)
    except (RuntimeError, TypeError):
        return None
    if bank is not None and not any(_is_alike(bank, known) for known in banks):
        banks.append(bank)
    return y


def _is_alike(bank: Tensor, known: Tensor) -> bool:
    """Whether a call in another thread has packed the same meanwhile: of one size, and for one method of multiplying,
    which the last entry tells (``csrc/cpu/ops/kept_banks.cpp``)."""
    return bank.numel() == known.numel() and bank[-1].item() == known[-1].item()
