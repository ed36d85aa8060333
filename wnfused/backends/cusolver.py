"""Dense decompositions on CUDA tensors by cuSOLVER itself, called from the library ``_cuda``.

What torch.linalg does around the same decompositions is left away: copies, R, and a call for each matrix, which are the
eigenvectors' of more than 32 rows (pytorch issue 175585) and the singular vectors' where only ``min(r, c)`` are asked
for. cuSOLVER is the copy that torch has loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wnfused.backends import native_cuda


def refusal(function: str, device: torch.device) -> str | None:
    """Why ``function``, ``"qr"``, ``"eigh"`` or ``"svd"``, cannot run on a CUDA device; None if it can."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return native_cuda.unavailable() or native_cuda.refused_device(index) or _missing(function, index)


_there: set[tuple[str, int]] = set()


def _missing(function: str, index: int) -> str | None:
    """What was found once stays; what is missing is looked for again."""
    if (function, index) in _there:
        return None
    # torch loads its part that is linked with cuSOLVER when it first needs it, and its folder is known to torch alone.
    torch.linalg.qr(torch.ones(1, 1, device=f"cuda:{index}"))
    reason = torch.ops.wnfused_native.cusolver_missing(function)
    if not reason:
        _there.add((function, index))
    return reason or None


def _open(function: str, a: Tensor) -> None:
    """Also for those who did not ask ``refusal``: the op alone would look for a library that torch has not loaded."""
    if a.is_cuda and (reason := _missing(function, a.device.index)):
        raise RuntimeError(reason)


@native_cuda.memory_errors()
def orthonormal_rows(a: Tensor) -> Tensor:
    """``Q [n, r, c]`` of ``A = L Q``, ``r <= c``, with a positive diagonal of L, in the place of ``A`` if contiguous.

    ``A`` is float32 or float64. Matrix by matrix (``Xgeqrf``, ``orgqr``); the host waits once, for the statuses of all.
    """
    _open("qr", a)
    q = a.contiguous()
    if not torch.ops.wnfused_native.orthonormal_rows_(q).all():
        raise RuntimeError(f"cuSOLVER refused a QR decomposition of {list(a.shape)} matrices")
    return q


def _finite_copy(a: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices ``[n, r, c]`` to be overwritten, zeros where ``finite [n]`` is false.

    What cuSOLVER's iterations make of NaN is not documented and has changed between releases: an error of the whole
    call, a status, or numbers.
    """
    rows = a.reshape(-1, *a.shape[-2:]).clone(memory_format=torch.contiguous_format)
    finite = rows.isfinite().all(-1).all(-1)
    return rows.masked_fill_(~finite[:, None, None], 0.0), finite


def _check(what: str, finite: Tensor, info: Tensor) -> None:
    failed = ~finite | info.ne(0)
    if failed.any():
        number = int(failed.nonzero()[0])
        reason = f"cuSOLVER's {what} of it did not converge" if finite[number] else "it is not finite"
        raise torch.linalg.LinAlgError(f"matrix {number}: {reason}")


@native_cuda.memory_errors()
def eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues ``[..., n]`` and eigenvectors ``[..., n, n]``, as columns, of symmetric ``A``.

    Float32 or float64. All matrices at once (``XsyevBatched``).

    Raises:
        torch.linalg.LinAlgError: a matrix is not finite, or did not converge.
    """
    _open("eigh", a)
    rows, finite = _finite_copy(a)
    values, info = torch.ops.wnfused_native.cuda_eigh_(rows)
    _check("eigenvalues", finite, info)
    # Eigenvectors are columns to cuSOLVER, which are rows here.
    return values.reshape(a.shape[:-1]), rows.reshape(a.shape).mT


def _svd_by_iterations(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vt = torch.linalg.svd(a, driver="gesvd" if a.is_cuda else None)
    return u, s, vt


@native_cuda.memory_errors()
def svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``U [..., r, k]``, ``s [..., k]`` from the largest, ``V^T [..., k, c]`` of ``A [..., r, c]``; ``k = min(r, c)``.

    Float32 or float64, r and c from 1 to 32. All matrices at once (``gesvdjBatched``); one that Jacobi's rotations do
    not get to the end of goes by QR iterations, as in torch.

    Raises:
        torch.linalg.LinAlgError: a matrix is not finite, or did not converge.
    """
    _open("svd", a)
    rows, finite = _finite_copy(a)
    left, values, right, info = torch.ops.wnfused_native.cuda_svd_(rows)
    (*batch, r, c), k = a.shape, values.shape[-1]
    unfinished = info.ne(0) & finite
    if unfinished.any():
        u, values[unfinished], right[unfinished] = _svd_by_iterations(a.reshape(-1, r, c)[unfinished])
        left[unfinished], info = u.mT, info.masked_fill(unfinished, 0)
    _check("SVD", finite, info)
    # Singular vectors are columns to cuSOLVER, which are rows here, and A is its own transpose there.
    return left[:, :k].reshape(*batch, k, r).mT, values.reshape(*batch, k), right[:, :k].reshape(*batch, k, c)
