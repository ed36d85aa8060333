"""Batched orthogonal matrices, Haar-distributed: all layers of one shape at once.

The Q factor of a Gaussian matrix whose R has a positive diagonal is Haar-distributed (Mezzadri 2007), and that pair is
unique, so every route below draws from the same distribution and, up to rounding, gives the same Q for the same
Gaussians. They differ in cost and in what they survive:

    householder     LAPACK's or cuSOLVER's QR by torch.linalg, matrix by matrix, signs put right afterwards: any shape
    cusolver        the same on a GPU, in place and without R (csrc/cuda/orthonormal.cu)
    cholesky_qr2    Q = L^-1 A with A A^T = L L^T, twice: a dozen batched calls for all matrices, but the condition
                    number k of A must stay below 1 / sqrt(u) (Yamamoto et al. 2015)
    native          the same on a CPU in one pass over each matrix, which stays in cache (csrc/cpu/orthonormal)

A Gaussian matrix that is twice as long as wide has k about 6, so float32 will do; of a nearly square one k has no
useful bound, so on a GPU, where the first route would go matrix by matrix, the second runs in float64, and the rare
matrices for which even that is too narrow are found by their Gram matrix and go the first way. Float64, too, where
torch may round the operands of float32 products to TF32: those would neither give Q nor show that they did not, and
torch's flag, which is that of all threads, stays as the user set it.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from wnfused import dispatch
from wnfused._numbers import draws_on, finite, random_source
from wnfused.backends import cusolver
from wnfused.backends import native as kernels
from wnfused.backends.triton.support import precision
from wnfused.ops._arguments import floating
from wnfused.reference import wide

# Matrices are worked on in chunks of this many elements, which stay in a CPU's cache and fill a GPU.
_CHUNK = {"cpu": 1 << 21, "cuda": 1 << 26}


class Route(Enum):
    """How the Q factors of one chunk are computed."""

    HOUSEHOLDER = "householder"
    CUSOLVER = "cusolver"
    NATIVE = "native"
    CHOLESKY = "cholesky_qr2"
    CHOLESKY_WIDE = "cholesky_qr2 in float64"


# What the native route takes: matrices that stay in a core's cache.
_NATIVE_ENTRIES = 1 << 18


def route(count: int, short: int, long: int, dtype: torch.dtype, device_type: str, native: bool = False) -> Route:
    """The route for ``count`` matrices of ``short <= long`` in ``dtype``, one of float32 and float64.

    Householder's, unless the matrices are well-conditioned by their shape or on a device where matrix by matrix costs
    a launch for each, and in plain torch are enough for a batch. ``native``: whether the C++ library is asked for; on a
    GPU it calls cuSOLVER where Householder is the choice.
    """
    matrix_by_matrix = Route.CUSOLVER if native and device_type == "cuda" and short > 0 else Route.HOUSEHOLDER
    # P(k > t) falls like t^-(long - short + 1): at twice as long, and eight longer, nobody ever meets a breakdown.
    tame = long >= 2 * short and long - short >= 8
    fits = 1 <= short <= kernels.ORTHONORMAL_ROWS and short * long <= _NATIVE_ENTRIES
    if native and device_type == "cpu" and dtype == torch.float32 and tame and fits:
        return Route.NATIVE
    if short == 0 or count < 4:
        return matrix_by_matrix
    exact = dtype == torch.float64 or device_type != "cuda" or precision(dtype, "matmul") != "tf32"
    if tame:
        return Route.CHOLESKY if exact else Route.CHOLESKY_WIDE
    if device_type != "cuda" or short > 1024:
        return matrix_by_matrix
    return Route.CHOLESKY if dtype == torch.float64 else Route.CHOLESKY_WIDE


@torch.no_grad()
def orthogonal_batched(tensor: Tensor, *, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Fills ``tensor [..., r, c]`` in place with independent Haar-distributed matrices times ``gain``.

    Uniform over matrices with orthonormal columns where r >= c, orthonormal rows otherwise.

    Args:
        tensor: floating point, at least two dims; narrower types than float32 are computed in float32.
        gain: factor on every matrix.
        generator: source of the Gaussians, on the tensor's device; torch's own for it if None. The same seed gives the
            same matrices for the same shape, dtype and device, however the memory is laid out.

    Returns:
        ``tensor``.

    Raises:
        TypeError: ``tensor`` is not floating point or not dense, or ``generator`` no generator.
        ValueError: it has fewer than two dims, or entries that share memory; ``gain`` is not finite; ``generator`` is
            one of another device.
        BackendUnavailableError: the native backend was asked for by name and the library that has the route is not
            there: on a CPU, for float32 matrices at least twice as long as wide, the C++ library; on a GPU, for ones so
            large or few that Householder's QR takes them, the CUDA library or its cuSOLVER. An automatic choice takes
            plain torch then, after a ``wnfused.BackendWarning``.

    Source: Mezzadri 2007, "How to generate random matrices from the classical compact groups"; Yamamoto, Nakatsukasa,
    Yanagisawa & Fukaya 2015, "Roundoff error analysis of the CholeskyQR2 algorithm".
    """
    floating("tensor", tensor)
    if tensor.dim() < 2:
        raise ValueError(f"tensor: shape {list(tensor.shape)} must have at least two dims, [..., r, c]")
    if _overlaps(tensor):
        raise ValueError(
            f"tensor: of strides {list(tensor.stride())}, its entries share memory; use tensor.contiguous()"
        )
    finite(gain=gain)
    random_source(generator=generator)
    if tensor.numel() == 0 or tensor.device.type == "meta" or is_fake(tensor):  # there is nothing to fill
        return tensor
    draws_on(tensor.device, generator=generator)
    rows, columns = tensor.shape[-2:]
    short, long = min(rows, columns), max(rows, columns)
    matrices = tensor.reshape(-1, rows, columns)
    size = max(1, _CHUNK.get(tensor.device.type, _CHUNK["cuda"]) // (rows * columns))
    # One buffer for all chunks: freed between two of them it would stay with the allocator beside the next one.
    buffer = torch.empty(min(size, len(matrices)), short, long, dtype=wide(tensor.dtype), device=tensor.device)
    for chunk in matrices.split(size):
        gaussian = buffer[: len(chunk)].normal_(generator=generator)
        q = orthonormal_rows(gaussian)
        if gain != 1.0:
            q *= gain
        chunk.copy_(q if rows <= columns else q.mT)
    if not matrices._is_view():  # none of the tensor has that shape
        tensor.copy_(matrices.view(tensor.shape))
    return tensor


def _overlaps(tensor: Tensor) -> bool:
    """Whether entries share memory: a step along some dim, from the shortest on, ends within what those before span."""
    span = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if step <= span:
                return True
            span += step * (size - 1)
    return False


def orthonormal_rows(a: Tensor) -> Tensor:
    """``Q [n, short, long]`` of ``A = L Q`` with ``L`` lower triangular and its diagonal positive, for full-rank ``A``.

    ``A`` is float32 or float64, and may be overwritten.
    """
    shape = len(a), a.shape[-2], a.shape[-1], a.dtype, a.device.type
    how = route(*shape, dispatch.requested() in (None, "native"))
    if how in (Route.NATIVE, Route.CUSOLVER):
        reason = kernels.unavailable() if how is Route.NATIVE else cusolver.refusal("qr", a.device)
        if reason is None:
            return native(a) if how is Route.NATIVE else cusolver.orthonormal_rows(a)
        dispatch.pass_over("orthogonal_batched", "native", reason)
        how = route(*shape)
    if how is Route.CHOLESKY:
        return cholesky_qr2(a)
    if how is Route.CHOLESKY_WIDE:
        return cholesky_qr2(a.double()).to(a.dtype)
    return householder(a)


def householder(a: Tensor) -> Tensor:
    """By torch.linalg, for any shape and condition."""
    q, r = torch.linalg.qr(a.mT)
    # sign(0) would erase a row; a zero on R's diagonal has probability 0 but costs nothing to survive.
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2).to(q.dtype)
    return (q * sign if q.requires_grad else q.mul_(sign)).mT


def native(a: Tensor) -> Tensor:
    """By the C++ kernel, in place; what is too ill-conditioned for it goes to Householder."""
    q = a.contiguous()
    solved = kernels.orthonormal_rows_(q)
    if not solved.all():
        q[~solved] = householder(q[~solved])
    return q


def cholesky_qr2(a: Tensor) -> Tensor:
    """By ``A A^T = L L^T``, ``A <- L^-1 A``, and the same again where it was not enough.

    The first round leaves ``Q Q^T = I + E`` with E of the order of ``k^2 u``. As orthonormal as Householder's
    reflections leave rows, 32 u, is good enough. Where it is more but still small, the second round's factor is known
    without another decomposition: ``L = I + tril(E) - diag(E) / 2 + O(E^2)``. Where E is not small, the matrix is too
    ill-conditioned for this route and goes to Householder's.
    """
    with torch.autocast(a.device.type, enabled=False):
        return _cholesky_qr2(a)


def _cholesky_qr2(a: Tensor) -> Tensor:
    identity = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    gram = a @ a.mT
    factor, _ = torch.linalg.cholesky_ex(gram)
    # Inverting L, which is small, and multiplying beats solving for all of A.
    q = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False) @ a
    error = torch.bmm(q, q.mT, out=gram).sub_(identity)
    size = error.abs().amax((-2, -1))
    unit = torch.finfo(a.dtype).eps / 2
    inexact = ~(size < 32 * unit)  # NaN counts
    if inexact.any():
        # The squares of E's entries, summed over a row, must go unseen.
        broken = ~(size < math.sqrt(unit / a.shape[-2]))
        again = inexact & ~broken
        correction = error[again].tril_()
        correction.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        q[again] -= correction @ q[again]
        q[broken] = householder(a[broken])
    return q
