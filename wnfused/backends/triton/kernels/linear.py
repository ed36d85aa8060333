"""The linear layer: ``y = act(s (x v^T) + b + r)`` and its gradients.

    forward          y  [M, N]   tile BM x BN, walks K; the norm of BN rows of v is summed beside the product
    input gradient   dx [M, K]   tile BM x BN of it, walks the N rows of v, scaled as they come by
    weight gradient  dw [N, K]   tile BN x BK, walks M: split over M and summed by `weight_gradient_sum`, or, where M is
                                 small, one program to BN rows, which walks K twice: once for <dw, v>, once for dv

The row norm costs no pass of its own: every tile of y reads its rows of v whole anyway. Masks of the activation are
applied to dy as it is loaded. Floor: the bytes of x, v and y once; 2 M N K FLOP a product, twice that to recompute.
"""

import triton
import triton.language as tl

from wnfused.backends.triton.kernels.common import activate, inverse, masked_gradient, product, row_scale


@triton.jit
def _grouped(program, rows, columns, GROUP: tl.constexpr):
    """Tile indices such that GROUP rows of tiles run side by side and find each other's operands in L2."""
    width = GROUP * columns
    first = program // width * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + program % width % height, program % width // height


@triton.jit
def forward(
    X, V, G, B, R, Y, NORM, M, N, K, x_m, x_k, v_n, v_k, slope,
    FUSED_NORM: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y ``[M, N]`` and, with FUSED_NORM, NORM; without, V is the effective weight. R lies as Y does."""
    m_tile, n_tile = _grouped(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    m = m_tile * BM + tl.arange(0, BM)
    n = n_tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = X + m.to(tl.int64)[:, None] * x_m
    v_at = V + n.to(tl.int64)[None, :] * v_n
    acc = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BN,), tl.float32)
    for start in range(0, K, BK):
        left = start + k
        x = tl.load(x_at + left[None, :] * x_k, mask=(m[:, None] < M) & (left[None, :] < K), other=0.0)
        v = tl.load(v_at + left[:, None] * v_k, mask=(left[:, None] < K) & (n[None, :] < N), other=0.0)
        if FUSED_NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
        acc = product(x, v.to(x.dtype), acc, PRECISION)
    inside = n < N
    if FUSED_NORM:
        norm = tl.sqrt_rn(squares)
        acc *= row_scale(tl.load(G + n, mask=inside, other=0.0), norm)[None, :]
        if m_tile == 0:
            tl.store(NORM + n, norm, mask=inside)
    if B is not None:
        acc += tl.load(B + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    within = (m[:, None] < M) & inside[None, :]
    if R is not None:
        acc += tl.load(R + at, mask=within, other=0.0).to(tl.float32)
    tl.store(Y + at, activate(acc, slope, ACTIVATION).to(Y.dtype.element_ty), mask=within)


@triton.jit
def input_gradient(
    DY, Y, V, G, NORM, DX, M, N, K, v_n, v_k, slope,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """DX ``[M, K] = (mask dy) (s v)``; the tile is BM x BN of DX, the walk over the rows of V takes BK at a time."""
    m_tile, k_tile = _grouped(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(K, BN), 8)
    m = m_tile * BM + tl.arange(0, BM)
    k = k_tile * BN + tl.arange(0, BN)
    row_at = m.to(tl.int64)[:, None] * N
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BK):
        n = start + tl.arange(0, BK)
        within = (m[:, None] < M) & (n[None, :] < N)
        dz = masked_gradient(DY, Y, row_at + n[None, :], within, slope, ACTIVATION)
        inside = (n[:, None] < N) & (k[None, :] < K)
        w = tl.load(V + n.to(tl.int64)[:, None] * v_n + k[None, :] * v_k, mask=inside, other=0.0)
        if SCALED:
            gain = tl.load(G + n, mask=n < N, other=0.0)
            w = w.to(tl.float32) * row_scale(gain, tl.load(NORM + n, mask=n < N, other=0.0))[:, None]
        acc = product(dz, w.to(dz.dtype), acc, PRECISION)
    tl.store(
        DX + m.to(tl.int64)[:, None] * K + k[None, :], acc.to(DX.dtype.element_ty),
        mask=(m[:, None] < M) & (k[None, :] < K),
    )  # fmt: skip


@triton.jit
def _weight_gradient_tile(
    DY, Y, X, n, k, first, last, M, N, K, x_m, x_k, slope, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``dw [BN, BK]`` and ``db [BN]`` summed over rows ``first`` to ``last`` of the batch."""
    acc = tl.zeros((BN, BK), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for start in range(first, last, BM):
        m = start + tl.arange(0, BM)
        rows = (m < M) & (m < last)
        within = (n[:, None] < N) & rows[None, :]
        dz = masked_gradient(DY, Y, m.to(tl.int64)[None, :] * N + n[:, None], within, slope, ACTIVATION)
        inside = rows[:, None] & (k[None, :] < K)
        x = tl.load(X + m.to(tl.int64)[:, None] * x_m + k[None, :] * x_k, mask=inside, other=0.0)
        acc = product(dz.to(x.dtype), x, acc, PRECISION)
        bias += tl.sum(dz.to(tl.float32), 1)
    return acc, bias


@triton.jit
def weight_gradient(
    DY, Y, X, V, PARTS, DOTS, BIASES, M, N, K, x_m, x_k, span, slope,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One part of the split: rows ``part * span`` to ``(part + 1) * span``; with it its part of ``<dw, v>`` and db."""
    k_tiles = tl.cdiv(K, BK)
    n_tile, k_tile = tl.program_id(0) // k_tiles, tl.program_id(0) % k_tiles
    part = tl.program_id(1)
    n = n_tile * BN + tl.arange(0, BN)
    k = k_tile * BK + tl.arange(0, BK)
    first = part * span
    acc, bias = _weight_gradient_tile(
        DY, Y, X, n, k, first, first + span, M, N, K, x_m, x_k, slope, ACTIVATION, PRECISION, BM, BN, BK
    )
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n[:, None] < N) & (k[None, :] < K)
    tl.store(PARTS + part.to(tl.int64) * N * K + at, acc, mask=inside)
    v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DOTS + (part * k_tiles + k_tile) * N + n, tl.sum(acc * v, 1), mask=n < N)
    if BIASES is not None and k_tile == 0:
        tl.store(BIASES + part * N + n, bias, mask=n < N)


@triton.jit
def weight_gradient_recomputed(
    DY, Y, X, V, G, NORM, DV, DG, DB, M, N, K, x_m, x_k, slope,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dv, dg and db of BN whole rows, no workspace: the products are taken twice, which a small M makes cheap."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = n < N
    norm = tl.load(NORM + n, mask=rows, other=0.0)
    reciprocal = inverse(norm)
    dgain = tl.zeros((BN,), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        dw, bias = _weight_gradient_tile(
            DY, Y, X, n, k, 0, M, M, N, K, x_m, x_k, slope, ACTIVATION, PRECISION, BM, BN, BK
        )
        inside = rows[:, None] & (k[None, :] < K)
        v = tl.load(V + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
        dgain += tl.sum(dw * (v * reciprocal[:, None]), 1)
    dgain = tl.where(norm == 0, 0.0, dgain)
    scale = row_scale(tl.load(G + n, mask=rows, other=0.0), norm)
    tl.store(DG + n, dgain.to(DG.dtype.element_ty), mask=rows)
    if DB is not None:
        tl.store(DB + n, bias.to(DB.dtype.element_ty), mask=rows)
    taken = rows & (norm != 0)  # a zero row has no gradient, be it NaN
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        dw, _ = _weight_gradient_tile(DY, Y, X, n, k, 0, M, M, N, K, x_m, x_k, slope, ACTIVATION, PRECISION, BM, BN, BK)
        inside = taken[:, None] & (k[None, :] < K)
        at = n.to(tl.int64)[:, None] * K + k[None, :]
        unit = tl.load(V + at, mask=inside, other=0.0).to(tl.float32) * reciprocal[:, None]
        dv = scale[:, None] * (dw - unit * dgain[:, None])
        tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=inside)
    # Zeros by themselves: beside the products, a mask of their own would spill registers.
    zero = rows & (tl.load(NORM + n, mask=rows, other=1.0) == 0)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at = n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(DV + at, tl.zeros((BN, BK), DV.dtype.element_ty), mask=zero[:, None] & (k[None, :] < K))
