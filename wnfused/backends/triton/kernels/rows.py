"""Row norms, the effective weight, and their backward.

A row of ``v`` seen along ``dim`` is ``outer`` runs of ``inner`` neighbours; rows of one run (``dim = 0``, contiguous or
channels_last) need no division to find an entry. A program takes ROWS rows and walks them ENTRIES at a time:

    v  [outer, rows, inner]        element e of row r at (e // inner) * rows * inner + r * inner + e % inner

Floor: ``v`` is read once from memory (the second walk finds a row in cache), ``w`` written once. Many tensors take one
launch: a table of their addresses tells each program which rows are its own.
"""

import triton
import triton.language as tl

from wnfused.backends.triton.kernels.common import inverse, row_scale


@triton.jit
def _offsets(row, entry, rows, length, inner, ONE_RUN: tl.constexpr):
    if ONE_RUN:
        return row.to(tl.int64)[:, None] * length + entry[None, :]
    run = (entry // inner).to(tl.int64) * rows * inner + entry % inner
    return row.to(tl.int64)[:, None] * inner + run[None, :]


@triton.jit
def _row_norm(V, row, rows, length, inner, ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr):
    squares = tl.zeros((ROWS, ENTRIES), tl.float32)
    for start in range(0, length, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        inside = (row[:, None] < rows) & (entry[None, :] < length)
        v = tl.load(V + _offsets(row, entry, rows, length, inner, ONE_RUN), mask=inside, other=0.0).to(tl.float32)
        squares += v * v
    return tl.sqrt_rn(tl.sum(squares, 1))


@triton.jit
def _normalise(
    V, G, W, NORM, SCALE, block, rows, length, inner,
    ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """``norm`` of one block of rows; unless they are None also ``w = s v`` and ``s``."""
    row = block * ROWS + tl.arange(0, ROWS)
    norm = _row_norm(V, row, rows, length, inner, ONE_RUN, ROWS, ENTRIES)
    tl.store(NORM + row, norm, mask=row < rows)
    if G is not None:
        scale = row_scale(tl.load(G + row, mask=row < rows, other=0.0), norm)
        if SCALE is not None:
            tl.store(SCALE + row, scale, mask=row < rows)
        if W is not None:
            for start in range(0, length, ENTRIES):
                entry = start + tl.arange(0, ENTRIES)
                inside = (row[:, None] < rows) & (entry[None, :] < length)
                at = _offsets(row, entry, rows, length, inner, ONE_RUN)
                v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
                tl.store(W + at, (v * scale[:, None]).to(W.dtype.element_ty), mask=inside)


@triton.jit
def _normalise_backward(
    DW, V, G, NORM, DV, DG, block, rows, length, inner,
    ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """``dg = <dw, v> / ||v||`` and ``dv = s (dw - v dg / ||v||)`` of one block of rows; ``dw`` lies as ``v`` does."""
    row = block * ROWS + tl.arange(0, ROWS)
    norm = tl.load(NORM + row, mask=row < rows, other=0.0)
    taken = (norm != 0)[:, None]  # a zero row has no gradient, be it NaN
    reciprocal = inverse(norm)[:, None]
    products = tl.zeros((ROWS, ENTRIES), tl.float32)
    for start in range(0, length, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        inside = (row[:, None] < rows) & (entry[None, :] < length)
        at = _offsets(row, entry, rows, length, inner, ONE_RUN)
        unit = tl.load(V + at, mask=inside, other=0.0).to(tl.float32) * reciprocal
        products += tl.load(DW + at, mask=inside & taken, other=0.0).to(tl.float32) * unit
    dgain = tl.sum(products, 1)
    tl.store(DG + row, dgain.to(DG.dtype.element_ty), mask=row < rows)
    scale = row_scale(tl.load(G + row, mask=row < rows, other=0.0), norm)[:, None]
    for start in range(0, length, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        inside = (row[:, None] < rows) & (entry[None, :] < length)
        at = _offsets(row, entry, rows, length, inner, ONE_RUN)
        unit = tl.load(V + at, mask=inside, other=0.0).to(tl.float32) * reciprocal
        dw = tl.load(DW + at, mask=inside & taken, other=0.0).to(tl.float32)
        tl.store(DV + at, (scale * (dw - unit * dgain[:, None])).to(DV.dtype.element_ty), mask=inside)


@triton.jit
def weight_norm(
    V, G, W, NORM, SCALE, rows, length, inner,
    ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """One tensor: ``norm``; with G also ``w``, ``s``, or both."""
    _normalise(V, G, W, NORM, SCALE, tl.program_id(0), rows, length, inner, ONE_RUN, ROWS, ENTRIES)


@triton.jit
def weight_norm_backward(
    DW, V, G, NORM, DV, DG, rows, length, inner,
    ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """One tensor."""
    _normalise_backward(DW, V, G, NORM, DV, DG, tl.program_id(0), rows, length, inner, ONE_RUN, ROWS, ENTRIES)


@triton.jit
def _pointer(ENTRY, column, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address of a table as a pointer; with ALIGNED, one to whole vectors of 16 bytes."""
    pointer = tl.load(ENTRY + column).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _extent(ENTRY, column, ALIGNED: tl.constexpr):
    extent = tl.load(ENTRY + column).to(tl.int32)
    return tl.multiple_of(extent, 16) if ALIGNED else extent


@triton.jit
def many_weight_norms(
    TABLE, OWNER, VALUE: tl.constexpr, GAIN: tl.constexpr, WEIGHTS: tl.constexpr, ALIGNED: tl.constexpr,
    ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Many tensors in one launch. TABLE ``[tensors, 9]``, int64: the addresses of v, g, w, norm and scale; rows, length
    of a row, inner, the first program. OWNER ``[programs]``: the tensor that a program works on. ALIGNED: so are the
    addresses and lengths of all."""
    ENTRY = TABLE + tl.load(OWNER + tl.program_id(0)).to(tl.int64) * 9
    V, G = _pointer(ENTRY, 0, VALUE, ALIGNED), _pointer(ENTRY, 1, GAIN, False)
    NORM, SCALE = _pointer(ENTRY, 3, tl.float32, False), _pointer(ENTRY, 4, tl.float32, False)
    rows, length, inner = _extent(ENTRY, 5, False), _extent(ENTRY, 6, ALIGNED), _extent(ENTRY, 7, False)
    block = tl.program_id(0) - _extent(ENTRY, 8, False)
    if WEIGHTS:
        W = _pointer(ENTRY, 2, VALUE, ALIGNED)
        _normalise(V, G, W, NORM, SCALE, block, rows, length, inner, ONE_RUN, ROWS, ENTRIES)
    else:
        _normalise(V, G, None, NORM, SCALE, block, rows, length, inner, ONE_RUN, ROWS, ENTRIES)


@triton.jit
def many_weight_norms_backward(
    TABLE, OWNER, VALUE: tl.constexpr, GAIN: tl.constexpr, ALIGNED: tl.constexpr,
    ONE_RUN: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Many tensors in one launch. TABLE ``[tensors, 10]``, int64: the addresses of dw, v, g, norm, dv and dg; then as
    ``many_weight_norms``."""
    ENTRY = TABLE + tl.load(OWNER + tl.program_id(0)).to(tl.int64) * 10
    DW, V, DV = (
        _pointer(ENTRY, 0, VALUE, ALIGNED),
        _pointer(ENTRY, 1, VALUE, ALIGNED),
        _pointer(ENTRY, 4, VALUE, ALIGNED),
    )
    G, NORM = _pointer(ENTRY, 2, GAIN, False), _pointer(ENTRY, 3, tl.float32, False)
    DG = _pointer(ENTRY, 5, GAIN, False)
    rows, length, inner = _extent(ENTRY, 6, False), _extent(ENTRY, 7, ALIGNED), _extent(ENTRY, 8, False)
    block = tl.program_id(0) - _extent(ENTRY, 9, False)
    _normalise_backward(DW, V, G, NORM, DV, DG, block, rows, length, inner, ONE_RUN, ROWS, ENTRIES)


@triton.jit
def weight_gradient_sum(
    PARTS, DOTS, BIASES, V, G, NORM, DV, DG, DB, rows, length, parts, dots, across,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of a split weight gradient, always in the same order, and takes it through the weight norm.

    PARTS ``[parts, rows, length]`` sums to ``dw`` and lies as ``v`` does; DOTS ``[dots, rows]`` to ``<dw, v>``; BIASES
    ``[parts, rows]`` to ``db``, or None. ``across`` programs lie side by side along a row.
    """
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    entry = tl.program_id(0) % across * ENTRIES + tl.arange(0, ENTRIES)
    dot = _column_sum(DOTS, row, rows, dots, ROWS, DEPTH)
    norm = tl.load(NORM + row, mask=row < rows, other=0.0)
    zero = norm == 0  # such a row has no gradient, be it NaN
    reciprocal = inverse(norm)
    dgain = tl.where(zero, 0.0, dot * reciprocal)
    at = row.to(tl.int64)[:, None] * length + entry[None, :]
    inside = (row[:, None] < rows) & (entry[None, :] < length)
    dw = tl.zeros((ROWS, ENTRIES), tl.float32)
    part_at = at
    for _ in range(parts):
        dw += tl.load(PARTS + part_at, mask=inside, other=0.0)
        part_at += rows * length
    unit = tl.load(V + at, mask=inside, other=0.0).to(tl.float32) * reciprocal[:, None]
    scale = row_scale(tl.load(G + row, mask=row < rows, other=0.0), norm)[:, None]
    dv = tl.where(zero[:, None], 0.0, scale * (dw - unit * dgain[:, None]))
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=inside)
    if tl.program_id(0) % across == 0:
        tl.store(DG + row, dgain.to(DG.dtype.element_ty), mask=row < rows)
        if BIASES is not None:
            db = _column_sum(BIASES, row, rows, parts, ROWS, DEPTH)
            tl.store(DB + row, db.to(DB.dtype.element_ty), mask=row < rows)


@triton.jit
def _column_sum(T, row, rows, depth, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """The sums over the first dim of ``T [depth, rows]`` for some of its columns."""
    sums = tl.zeros((DEPTH, ROWS), tl.float32)
    for start in range(0, depth, DEPTH):
        level = start + tl.arange(0, DEPTH)
        inside = (level[:, None] < depth) & (row[None, :] < rows)
        sums += tl.load(T + level[:, None] * rows + row[None, :], mask=inside, other=0.0)
    return tl.sum(sums, 0)
