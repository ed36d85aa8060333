"""The C++ backend: schemas of the kernels in the compiled libraries, and thin shells that call them.

The library registers its kernels under ``torch.ops.wnfused_native`` when it is opened. Wide convolutions and matrix
products are left to the vendor's library that torch carries; what is ours beside them is the norm, the scale and
the one pass for ``dv, dg``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wnfused import reference

_PACKAGE = Path(__file__).parents[1]

_schemas = torch.library.Library("wnfused_native", "DEF")
# `dim` is -1 for one norm over the whole tensor.
_schemas.define("weight_norm(Tensor v, Tensor g, int dim) -> (Tensor w, Tensor norm)")
_schemas.define(
    "weight_norm_backward(Tensor dw, Tensor v, Tensor g, Tensor norm, int dim) -> (Tensor dv, Tensor dg)"
)


@functools.cache
def unavailable() -> str | None:
    """Opens the library; the reason if there is none or it does not load."""
    library = next(iter(sorted(_PACKAGE.glob("_cpu*.so"))), None)
    if library is None:
        record = _PACKAGE / "_build.json"
        reasons = json.loads(record.read_text())["not_built"] if record.exists() else {}
        return reasons.get("cpu", "the C++ library was not built; `pip install --no-build-isolation .` builds it")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name} does not load: {error}"
    return None


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    reason = unavailable()
    if reason is not None:
        return reason
    if op not in globals():
        return f"it has no kernel for {op}"
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.device.type != "cpu":
                return f"it has no kernel for device {argument.device.type!r}"
            if argument.dtype not in _DTYPES:
                return f"it has no kernel for {argument.dtype}"
    return None


def _dense_rows(v: Tensor, dim: int | None) -> Tensor:
    """``v`` as the kernel reads it: contiguous, or for rows along dim 0 also channels_last, where a row is one run."""
    if v.is_contiguous():
        return v
    if dim == 0 and v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last):
        return v
    return v.contiguous()


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    dim = None if dim is None else dim % v.dim()
    v = _dense_rows(v, dim)
    w, norm = torch.ops.wnfused_native.weight_norm(v, g.to(v.dtype).contiguous(), -1 if dim is None else dim)
    return w, norm


def weight_norm_backward(
    dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0
) -> tuple[Tensor, Tensor]:
    dim = None if dim is None else dim % v.dim()
    v = _dense_rows(v, dim)
    if dw.stride() != v.stride() or dw.dtype != v.dtype:
        dw = torch.empty_like(v).copy_(dw)
    dv, dg = torch.ops.wnfused_native.weight_norm_backward(
        dw, v, g.to(v.dtype).contiguous(), norm, -1 if dim is None else dim
    )
    return dv, dg.to(g.dtype).reshape(g.shape)
