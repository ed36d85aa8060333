"""The convolution as an implicit matrix product over NHWC maps: forward and gradients. No patch is ever stored.

    x  [pixels of the input, C]       v  [F, C, taps] at f * C * taps + c * v_c + tap * v_t (OIHW or channels_last)
    y  [pixels of the output, F]      a tap is a place in the kernel, counted ky * KW + kx

    forward          y  [pixels, F]    tile BM pixels x BN filters, walks (tap, c) as one axis, BK at a time
    input gradient   dx [pixels, C]    tile BM pixels x BN channels, walks (tap, f)
    weight gradient  dw [F, (tap, c)]  tile BN filters x BK, walks a share of the output's pixels

Walking (tap, c) as one axis keeps the matrix unit fed when C is thin: 3 channels of a 3x3 kernel are 27 of 32 steps,
and 16 channels are two taps at a time. Each tap of a pixel is a load at an offset, masked at the border; neighbouring
taps meet in L1. Row norms are summed beside the forward product, as in `wnfused.backends.triton.kernels.linear`.
"""

import triton
import triton.language as tl

from wnfused.backends.triton.kernels.common import activate, masked_gradient, product, row_scale


@triton.jit
def _place(pixel, height, width):
    """``(image, y, x)`` of a pixel's number."""
    area = height * width
    image = pixel // area
    inside = pixel - image * area
    return image, inside // width, inside % width


@triton.jit
def _tap(step, channels, KW: tl.constexpr, TAPS: tl.constexpr):
    """``(tap, ky, kx, channel)`` of a step of the walk."""
    if TAPS == 1:
        tap = tl.zeros_like(step)
        return tap, tap, tap, step
    tap = step // channels
    return tap, tap // KW, tap % KW, step - tap * channels


@triton.jit
def forward(
    X, V, G, B, R, Y, NORM, pixels, C, H, W, F, OH, OW, v_c, v_t, slope, factor,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, FUSED_NORM: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``Y = factor act(s conv(X, V) + B + R)``; without FUSED_NORM, V is the effective weight."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.program_id(1) * BN + tl.arange(0, BN)
    image, oy, ox = _place(m, OH, OW)
    top, left = oy * SH - PH, ox * SW - PW
    corner = ((image.to(tl.int64) * H + top) * W + left) * C
    K = C * KH * KW
    v_at = V + f.to(tl.int64)[None, :] * K
    acc = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BN,), tl.float32)
    for start in range(0, K, BK):
        step = start + tl.arange(0, BK)
        tap, ky, kx, c = _tap(step, C, KW, KH * KW)
        y, x = top[:, None] + (ky * DH)[None, :], left[:, None] + (kx * DW)[None, :]
        inside = (m[:, None] < pixels) & (step[None, :] < K) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        patch = tl.load(X + corner[:, None] + ((ky * DH * W + kx * DW) * C + c)[None, :], mask=inside, other=0.0)
        rows = (step[:, None] < K) & (f[None, :] < F)
        v = tl.load(v_at + (c * v_c + tap * v_t)[:, None], mask=rows, other=0.0)
        if FUSED_NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
        acc = product(patch, v.to(patch.dtype), acc, PRECISION)
    filters = f < F
    if FUSED_NORM:
        norm = tl.sqrt_rn(squares)
        acc *= row_scale(tl.load(G + f, mask=filters, other=0.0), norm)[None, :]
        if tl.program_id(0) == 0:
            tl.store(NORM + f, norm, mask=filters)
    if B is not None:
        acc += tl.load(B + f, mask=filters, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * F + f[None, :]
    within = (m[:, None] < pixels) & filters[None, :]
    if R is not None:
        acc += tl.load(R + at, mask=within, other=0.0).to(tl.float32)
    tl.store(Y + at, (activate(acc, slope, ACTIVATION) * factor).to(Y.dtype.element_ty), mask=within)


@triton.jit
def input_gradient(
    DY, Y, V, G, NORM, A, R, DX, pixels, C, H, W, F, OH, OW, v_c, v_t, slope,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, SCALED: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``DX = [A > 0] conv^T(mask DY, s V) + R``: A, a map whose ReLU gave the input, and R may be None.

    Input pixel (y, x) meets output pixel ((y + PH - ky DH) / SH, ...) where the division leaves nothing.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    image, y, x = _place(m, H, W)
    K = F * KH * KW
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        step = start + tl.arange(0, BK)
        tap, ky, kx, f = _tap(step, F, KW, KH * KW)
        down, right = y[:, None] + PH - (ky * DH)[None, :], x[:, None] + PW - (kx * DW)[None, :]
        oy, ox = down // SH, right // SW
        inside = (m[:, None] < pixels) & (step[None, :] < K) & (down >= 0) & (oy < OH) & (right >= 0) & (ox < OW)
        if SH > 1:
            inside = inside & (down % SH == 0)
        if SW > 1:
            inside = inside & (right % SW == 0)
        at = ((image.to(tl.int64)[:, None] * OH + oy) * OW + ox) * F + f[None, :]
        dz = masked_gradient(DY, Y, at, inside, slope, ACTIVATION)
        rows = step < K
        v_at = f.to(tl.int64) * (C * KH * KW) + tap * v_t
        w = tl.load(V + v_at[:, None] + (c * v_c)[None, :], mask=rows[:, None] & (c[None, :] < C), other=0.0)
        if SCALED:
            gain = tl.load(G + f, mask=rows, other=0.0)
            w = w.to(tl.float32) * row_scale(gain, tl.load(NORM + f, mask=rows, other=0.0))[:, None]
        acc = product(dz, w.to(dz.dtype), acc, PRECISION)
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    within = (m[:, None] < pixels) & (c[None, :] < C)
    if A is not None:
        acc = tl.where(tl.load(A + at, mask=within, other=0.0).to(tl.float32) <= 0, 0.0, acc)
    if R is not None:
        acc += tl.load(R + at, mask=within, other=0.0).to(tl.float32)
    tl.store(DX + at, acc.to(DX.dtype.element_ty), mask=within)


@triton.jit
def weight_gradient(
    DY, Y, X, V, PARTS, DOTS, BIASES, pixels, C, H, W, F, OH, OW, v_c, v_t, span, slope,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One part of the split, output pixels ``part * span`` to ``(part + 1) * span``: of dw, of ``<dw, v>``, of db."""
    K = C * KH * KW
    k_tiles = tl.cdiv(K, BK)
    f_tile, k_tile = tl.program_id(0) // k_tiles, tl.program_id(0) % k_tiles
    part = tl.program_id(1)
    f = f_tile * BN + tl.arange(0, BN)
    step = k_tile * BK + tl.arange(0, BK)
    tap, ky, kx, c = _tap(step, C, KW, KH * KW)
    shift = ((ky * DH - PH) * W + kx * DW - PW) * C + c
    acc = tl.zeros((BN, BK), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    last = tl.minimum((part + 1) * span, pixels)
    for start in range(part * span, last, BM):
        m = start + tl.arange(0, BM)
        within = (f[:, None] < F) & (m[None, :] < last)
        dz = masked_gradient(DY, Y, m.to(tl.int64)[None, :] * F + f[:, None], within, slope, ACTIVATION)
        image, oy, ox = _place(m, OH, OW)
        y, x = (oy * SH - PH)[:, None] + (ky * DH)[None, :], (ox * SW - PW)[:, None] + (kx * DW)[None, :]
        inside = (m[:, None] < last) & (step[None, :] < K) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        corner = ((image.to(tl.int64) * H + oy * SH) * W + ox * SW) * C
        patch = tl.load(X + corner[:, None] + shift[None, :], mask=inside, other=0.0)
        acc = product(dz.to(patch.dtype), patch, acc, PRECISION)
        bias += tl.sum(dz.to(tl.float32), 1)
    at = f.to(tl.int64)[:, None] * K + (c * v_c + tap * v_t)[None, :]
    inside = (f[:, None] < F) & (step[None, :] < K)
    tl.store(PARTS + part.to(tl.int64) * F * K + at, acc, mask=inside)
    v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DOTS + (part * k_tiles + k_tile) * F + f, tl.sum(acc * v, 1), mask=f < F)
    if BIASES is not None and k_tile == 0:
        tl.store(BIASES + part * F + f, bias, mask=f < F)
