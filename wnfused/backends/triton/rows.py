"""Row norms, the effective weight and their backward: the host's side of ``kernels.rows``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wnfused import reference
from wnfused.backends.triton.configurations import SUM_TILE, rows_tile
from wnfused.backends.triton.kernels import rows as kernels
from wnfused.backends.triton.support import blocks, launch


@dataclass(frozen=True)
class Rows:
    """A dense ``v`` and how its rows lie: see ``kernels.rows``."""

    v: Tensor
    count: int
    length: int
    inner: int
    one_run: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.count, self.length, self.inner

    @property
    def constants(self) -> dict[str, int]:
        rows, entries = rows_tile(self.length)
        return {"ONE_RUN": self.one_run, "ROWS": rows, "ENTRIES": entries}

    @property
    def grid(self) -> tuple[int]:
        return (blocks(self.count, rows_tile(self.length)[0]),)

    def norms(self) -> Tensor:
        """Unwritten norms."""
        return self.v.new_empty([self.count], dtype=torch.float32)


def dense(v: Tensor) -> Tensor:
    """``v`` with each row along dim 0 in one run of memory: contiguous or channels_last."""
    if v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last)):
        return v
    return v.contiguous()


def rows_of(v: Tensor, dim: int) -> Rows:
    dim = dim % v.dim()
    if dim == 0:
        v = dense(v)
        length = math.prod(v.shape[1:])
        return Rows(v, v.shape[0], length, length, True)
    v = v.contiguous()
    count, inner = v.shape[dim], math.prod(v.shape[dim + 1 :])
    return Rows(v, count, v.numel() // count if count else 0, inner, False)


def flat(g: Tensor) -> Tensor:
    return g.reshape(-1).contiguous()


def effective_weight(v: Tensor, g: Tensor, dim: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``w`` in ``dtype``, rounded once, in the memory layout of ``v``; and the row norms.

    A kernel that works by rows would give a norm over the whole tensor (``dim=None``) to one program: torch's own
    reductions spread it over the chip.
    """
    if dim is None:
        w, norm = reference.weight_norm(v.float(), g, None)
        return w.to(dtype), norm
    rows = rows_of(v, dim)
    w, norm = torch.empty_like(rows.v, dtype=dtype), rows.norms()
    launch(kernels.weight_norm, rows.grid, (rows.v, flat(g), w, norm, None, *rows.sizes), **rows.constants)
    return w, norm


def row_norm(v: Tensor, dim: int = 0) -> Tensor:
    """The row norms of one tensor, float32."""
    rows = rows_of(v, dim)
    norm = rows.norms()
    launch(kernels.weight_norm, rows.grid, (rows.v, None, None, norm, None, *rows.sizes), **rows.constants)
    return norm


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    return effective_weight(v, g, dim, v.dtype)


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    if dim is None:
        return reference.weight_norm_backward(dw, v, g, norm, None)
    rows = rows_of(v, dim)
    dv, dg = torch.empty_like(rows.v), torch.empty(g.shape, dtype=g.dtype, device=g.device)
    arguments = (as_lies(dw, rows.v), rows.v, flat(g), norm, dv, dg, *rows.sizes)
    launch(kernels.weight_norm_backward, rows.grid, arguments, **rows.constants)
    return dv, dg


def as_lies(dw: Tensor, v: Tensor) -> Tensor:
    """``dw`` in the memory layout of a dense ``v``; its dtype is its own."""
    return dw if dw.stride() == v.stride() else torch.empty_like(v, dtype=dw.dtype).copy_(dw)


def summed_weight_gradient(
    parts: Tensor, dots: Tensor, biases: Tensor | None, v: Tensor, g: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(dv, dg, db)`` of a split weight gradient, whose parts lie as the dense ``v`` does."""
    rows, entries, depth = SUM_TILE
    count, length = v.shape[0], math.prod(v.shape[1:])
    dv, dg = torch.empty_like(v), torch.empty(g.shape, dtype=g.dtype, device=g.device)
    db = None if biases is None else v.new_empty([count])
    # A row without entries still has its gain and bias.
    across = max(blocks(length, entries), 1)
    sizes = count, length, parts.shape[0], dots.shape[0], across
    arguments = (parts, dots, biases, v, flat(g), norm, dv, dg, db, *sizes)
    # In one dim: a grid's other dims end at 65535.
    grid = (blocks(count, rows) * across,)
    launch(kernels.weight_gradient_sum, grid, arguments, ROWS=rows, ENTRIES=entries, DEPTH=depth)
    return dv, dg, db


# ------------------------------------------------------------------------------------- many tensors in one launch

Tensors = Sequence[Tensor]


def weight_norm_many(
    v: Tensors, g: Tensors, dim: int | None = 0, weights: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if dim is None:
        return reference.weight_norm_many(v, g, None, weights)
    rows = [rows_of(t, dim) for t in v]
    gains = [flat(t) for t in g]
    w = [torch.empty_like(r.v) for r in rows] if weights else []
    norm, scale = [r.norms() for r in rows], [r.norms() for r in rows]
    captured = _must_go_one_by_one(v)
    if not captured:
        columns = [[r.v for r in rows], gains, w or [r.v for r in rows], norm, scale]
        _launch_many(kernels.many_weight_norms, rows, gains, columns, (0, 2), WEIGHTS=weights)
    each = [
        (r.v, gains[i], w[i] if weights else None, norm[i], scale[i], *r.sizes) for i, r in enumerate(rows)
    ]  # fmt: skip
    _launch_each(kernels.weight_norm, rows, each, (2, 3, 4), captured)
    return w, norm, scale


def weight_norm_many_backward(
    dw: Tensors, v: Tensors, g: Tensors, norm: Tensors, dim: int | None = 0
) -> tuple[list[Tensor], list[Tensor]]:
    if dim is None:
        return reference.weight_norm_many_backward(dw, v, g, norm, None)
    rows = [rows_of(t, dim) for t in v]
    gains = [flat(t) for t in g]
    gradients = [as_lies(d, r.v).to(r.v.dtype) for d, r in zip(dw, rows, strict=True)]
    dv, dg = [torch.empty_like(r.v) for r in rows], [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in g]
    captured = _must_go_one_by_one(v)
    if not captured:
        columns = [gradients, [r.v for r in rows], gains, list(norm), dv, dg]
        _launch_many(kernels.many_weight_norms_backward, rows, gains, columns, (0, 1, 4))
    each = [
        (gradients[i], r.v, gains[i], norm[i], dv[i], dg[i], *r.sizes) for i, r in enumerate(rows)
    ]  # fmt: skip
    _launch_each(kernels.weight_norm_backward, rows, each, (4, 5), captured)
    return dv, dg


def _must_go_one_by_one(v: Tensors) -> bool:
    """A graph that is being captured would copy its table again at each replay, from memory long given to others."""
    return _on_a_gpu(v) and torch.cuda.is_current_stream_capturing()


def _on_a_gpu(v: Tensors) -> bool:
    return len(v) > 0 and v[0].is_cuda


_launched: set[tuple[Any, ...]] = set()
"""What single launches were made of so far: all that Triton may make another machine code for."""


def _launch_each(
    kernel: Any, rows: Sequence[Rows], arguments: Sequence[tuple[Any, ...]], outputs: Sequence[int], captured: bool
) -> None:
    """One launch a tensor: under capture for all of them, else, on a GPU, for those the like of which had none yet.

    The latter are made because nothing may be compiled or loaded under capture, and calls that warm up for one come
    this way. What they write, the arguments of the numbers ``outputs``, is thrown away: it may differ in the last bit
    from what the launch for all wrote.
    """
    if not captured and not _on_a_gpu([r.v for r in rows]):
        return
    for r, of_one in zip(rows, arguments, strict=True):
        key = (kernel, r.v.device, r.one_run, *(
            (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else a for a in of_one
        ))  # fmt: skip
        if captured:
            launch(kernel, r.grid, of_one, **r.constants)
        elif key not in _launched:
            thrown_away = list(of_one)
            for number in outputs:
                thrown_away[number] = None if of_one[number] is None else torch.empty_like(of_one[number])
            launch(kernel, r.grid, tuple(thrown_away), **r.constants)
        _launched.add(key)


def _launch_many(
    kernel: Any, rows: Sequence[Rows], gains: Tensors, columns: Sequence[Tensors], wide: Sequence[int],
    **constants: bool,
) -> None:  # fmt: skip
    """One launch for each combination of dtypes and row layouts, of which a model has few.

    Args:
        columns: for each address in the kernel's table the tensors, in the order of ``rows``.
        wide: the columns whose rows are read in whole vectors where all are aligned.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, (r, gain) in enumerate(zip(rows, gains, strict=True)):
        kinds.setdefault((r.v.dtype, gain.dtype, *r.constants.values()), []).append(i)
    for (value, gain_dtype, *_), members in kinds.items():
        table: list[list[int]] = []
        owner: list[int] = []
        for i in members:
            table.append([*(column[i].data_ptr() for column in columns), *rows[i].sizes, len(owner)])
            owner += [len(table) - 1] * rows[i].grid[0]
        n, device = len(columns), rows[members[0]].v.device
        aligned = all(entry[c] % 16 == 0 for entry in table for c in (*wide, n + 1))
        arguments = (_sent(table, torch.int64, device), _sent(owner, torch.int32, device))
        constants_here = {"VALUE": triton_dtype(value), "GAIN": triton_dtype(gain_dtype), "ALIGNED": aligned}
        launch(kernel, (len(owner),), arguments, **constants, **constants_here, **rows[members[0]].constants)


def _sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """To a GPU through pinned memory, so that the copy does not wait for the stream."""
    on_host = torch.tensor(numbers, dtype=dtype)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
