"""Singular vectors of batches of matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wnfused import dispatch
from wnfused.backends import cusolver

_JACOBI_ROWS = 32
"""``gesvdjBatched`` takes no more rows or columns."""


def batched_svd_pays(count: int, rows: int, columns: int, device_type: str) -> bool:
    """Whether torch.linalg.svd goes matrix by matrix where cuSOLVER takes all: small ones, on a GPU.

    torch calls the batched solver for square matrices alone, and where the full square factors are asked for.
    """
    few = min(rows, columns) >= 1 and max(rows, columns) <= _JACOBI_ROWS
    return device_type == "cuda" and count > 1 and few and rows != columns


def economy_svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``U [..., r, k]``, ``s [..., k]`` from the largest, ``V^T [..., k, c]`` of ``A [..., r, c]``; ``k = min(r, c)``.

    By torch.linalg.svd; by cuSOLVER's batched solver where that pays and the native backend may be used. Where it is
    missing, torch.linalg does after a ``wnfused.BackendWarning``. Not to be differentiated.

    Args:
        a: float32 or float64.

    Raises:
        BackendUnavailableError: the native backend was asked for by name and has no such solver here.
        torch.linalg.LinAlgError: no convergence.
    """
    *batch, rows, columns = a.shape
    if batched_svd_pays(math.prod(batch), rows, columns, a.device.type) and dispatch.requested() in (None, "native"):
        reason = cusolver.refusal("svd", a.device)
        if reason is None:
            return cusolver.svd(a)
        dispatch.pass_over("economy_svd", "native", reason)
    u, s, vt = torch.linalg.svd(a, full_matrices=False)
    return u, s, vt
