"""Eigenvectors of batches of symmetric matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from wnfused import dispatch
from wnfused.backends import cusolver


def batched_eigh_pays(count: int, n: int, device_type: str) -> bool:
    """Whether torch.linalg.eigh may go matrix by matrix where cuSOLVER takes all: beyond 32 rows, on a GPU."""
    return device_type == "cuda" and count > 1 and n > 32


def symmetric_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues ``[..., n]`` and eigenvectors ``[..., n, n]``, as columns, of symmetric ``A [..., n, n]``.

    By torch.linalg.eigh; by cuSOLVER's batched solver where that pays and the native backend may be used. Where it is
    missing, torch.linalg does after a ``wnfused.BackendWarning``.

    Args:
        a: float32 or float64.

    Raises:
        BackendUnavailableError: the native backend was asked for by name and has no such solver here.
        torch.linalg.LinAlgError: no convergence.
    """
    count = a.shape[:-2].numel()
    if batched_eigh_pays(count, a.shape[-1], a.device.type) and dispatch.requested() in (None, "native"):
        reason = cusolver.refusal("eigh", a.device)
        if reason is None:
            return cusolver.eigh(a)
        dispatch.pass_over("symmetric_eigh", "native", reason)
    values, vectors = torch.linalg.eigh(a)
    return values, vectors
