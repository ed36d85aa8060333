"""Row norms, the effective weight and their backward: the host's side of ``kernels.rows``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wnfused.backends.triton.configurations import ROWS_TILE, SUM_TILE
from wnfused.backends.triton.kernels import rows as kernels
from wnfused.backends.triton.support import blocks, launch

_ROWS, _ENTRIES = ROWS_TILE


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
        return {"ONE_RUN": self.one_run, "ROWS": _ROWS, "ENTRIES": _ENTRIES}

    @property
    def grid(self) -> tuple[int]:
        return (blocks(self.count, _ROWS),)

    def norms(self, dim: int | None) -> Tensor:
        """Unwritten norms."""
        return self.v.new_empty([] if dim is None else [self.count], dtype=torch.float32)


def dense(v: Tensor) -> Tensor:
    """``v`` with each row along dim 0 in one run of memory: contiguous or channels_last."""
    if v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last)):
        return v
    return v.contiguous()


def rows_of(v: Tensor, dim: int | None) -> Rows:
    if dim is None:
        v = v.contiguous()
        return Rows(v, 1, v.numel(), v.numel(), True)
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
    """``w`` in ``dtype``, rounded once, in the memory layout of ``v``; and the row norms."""
    rows = rows_of(v, dim)
    w, norm = torch.empty_like(rows.v, dtype=dtype), rows.norms(dim)
    launch(kernels.weight_norm, rows.grid, (rows.v, flat(g), w, norm, *rows.sizes), **rows.constants)
    return w, norm


def row_norm(v: Tensor, dim: int | None = 0) -> Tensor:
    """The row norms of one tensor, float32."""
    rows = rows_of(v, dim)
    norm = rows.norms(dim)
    launch(kernels.weight_norm, rows.grid, (rows.v, None, None, norm, *rows.sizes), **rows.constants)
    return norm


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    return effective_weight(v, g, dim, v.dtype)


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    rows = rows_of(v, dim)
    if dw.stride() != rows.v.stride():
        dw = torch.empty_like(rows.v, dtype=dw.dtype).copy_(dw)
    dv, dg = torch.empty_like(rows.v), torch.empty(g.shape, dtype=g.dtype, device=g.device)
    arguments = (dw, rows.v, flat(g), norm, dv, dg, *rows.sizes)
    launch(kernels.weight_norm_backward, rows.grid, arguments, **rows.constants)
    return dv, dg


def summed_weight_gradient(
    parts: Tensor, dots: Tensor, biases: Tensor | None, v: Tensor, g: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(dv, dg, db)`` of a split weight gradient, whose parts lie as the dense ``v`` does."""
    rows, entries, depth = SUM_TILE
    count, length = v.shape[0], math.prod(v.shape[1:])
    dv, dg = torch.empty_like(v), torch.empty(g.shape, dtype=g.dtype, device=g.device)
    db = None if biases is None else v.new_empty([count])
    arguments = (parts, dots, biases, v, flat(g), norm, dv, dg, db, count, length, parts.shape[0], dots.shape[0])
    # A row without entries still has its gain and bias.
    grid = (blocks(count, rows), max(blocks(length, entries), 1))
    launch(kernels.weight_gradient_sum, grid, arguments, ROWS=rows, ENTRIES=entries, DEPTH=depth)
    return dv, dg, db


# ------------------------------------------------------------------------------------- many tensors in one launch


def many_row_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The row norms along dim 0 of many tensors of one dtype and device, in one launch; views of one tensor.

    Args:
        tensors: any shapes, contiguous or channels_last.

    Raises:
        ValueError: a tensor's rows do not lie each in one run, or dtypes or devices differ.
    """
    if not tensors:
        return []
    first = tensors[0]
    for i, v in enumerate(tensors):
        if v.dtype != first.dtype or v.device != first.device:
            raise ValueError(f"tensors[{i}]: {v.dtype} on {v.device}; use {first.dtype} on {first.device} as the first")
        if dense(v) is not v:
            raise ValueError(f"tensors[{i}]: strides {v.stride()}; make it contiguous or channels_last")
    addresses = tuple(v.data_ptr() for v in tensors)
    table, owner = _tables(addresses, tuple((v.shape[0], math.prod(v.shape[1:])) for v in tensors), first.device)
    norm = first.new_empty([sum(v.shape[0] for v in tensors)], dtype=torch.float32)
    constants = {"VALUE": _triton_dtype(first.dtype), "ROWS": _ROWS, "ENTRIES": _ENTRIES}
    launch(kernels.many_row_norms, (owner.numel(),), (table, owner, norm), **constants)
    return list(norm.split([v.shape[0] for v in tensors]))


@functools.lru_cache(maxsize=8)
def _tables(
    addresses: tuple[int, ...], sizes: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The kernel's TABLE and OWNER. Parameters stay where they are from step to step, so few are ever built."""
    table: list[list[int]] = []
    owner: list[int] = []
    place = 0
    for i, (address, (count, length)) in enumerate(zip(addresses, sizes, strict=True)):
        table.append([address, count, length, len(owner), place])
        owner += [i] * blocks(count, _ROWS)
        place += count
    on_host = torch.tensor(table, dtype=torch.int64), torch.tensor(owner, dtype=torch.int64)
    if device.type == "cuda":  # pinned memory, so that the copy does not wait for the stream
        return on_host[0].pin_memory().to(device, non_blocking=True), on_host[1].pin_memory().to(
            device, non_blocking=True
        )
    return on_host


def _triton_dtype(dtype: torch.dtype) -> object:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
