"""The C++ backend: thin shells that call the kernels in the compiled libraries.

The library registers its kernels under ``torch.ops.wnfused_native`` when it is opened. Residual stages and most
convolutions and linear layers are multiplied by its own kernels; other products are left to the vendor's library that
torch carries, and what is ours beside them is the norm, the scale and the one pass for ``dv, dg``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wnfused.backends import native_composed, native_cuda, operands_of, tensors_of
from wnfused.backends.asked import bits_of, given
from wnfused.backends.library import opened
from wnfused.backends.native_norm import (  # noqa: F401  ops of this backend, found by name
    weight_norm,
    weight_norm_backward,
    weight_norm_many,
    weight_norm_many_backward,
)
from wnfused.backends.native_schemas import SCHEMAS

_schemas = torch.library.Library("wnfused_native", "DEF")
for _schema in SCHEMAS:
    _schemas.define(_schema)


@functools.cache
def unavailable() -> str | None:
    """Opens the library; the reason if there is none or it does not load."""
    return opened("cpu")


def cuda_unavailable() -> str | None:
    """Why there are no CUDA kernels here, None if there are."""
    return native_cuda.unavailable()


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_STAGE_DTYPES = (torch.float32, torch.bfloat16)


def instruction_set() -> str | None:
    """The vector instruction set that the kernels run on, None without the library."""
    return None if unavailable() is not None else torch.ops.wnfused_native.cpu_isa()


def takes_conv(
    v: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, transposed: bool
) -> bool:
    """Whether convolutions with weights that do not change are multiplied here.

    Asked of a map of 256 pixels and of one of 64, where more weights are worth keeping; over three dims of two such
    volumes, and of larger maps where the window is.
    """
    dims = v.dim() - 2
    if v.dtype != torch.float32 or not v.is_cpu:
        return False
    outputs, inputs, *kernel = v.shape
    given = ((1, kernel), (1, stride), (0, padding), (1, dilation))
    triples = [[*[missing] * (3 - dims), *extents] for missing, extents in given]
    reach = [d * (k - 1) + 1 for k, d in zip(triples[0], triples[3], strict=True)]
    for asked in {1: ([1, 1, 256], [1, 1, 64]), 2: ([1, 16, 16], [1, 8, 8]), 3: ([4, 8, 8], [2, 4, 4])}[dims]:
        size = [max(pair) for pair in zip(asked, reach, strict=True)]
        maps = [2 if dims == 3 else 1, inputs * groups, outputs, *size]
        forward, _ = torch.ops.wnfused_native.cpu_conv_ways(maps, *triples, groups, dims, transposed, kept=True)
        if forward not in ("vendor", "unfolded"):
            return True
    return False


class Bounds(NamedTuple):
    """Numbers of the library that its callers must know."""

    few_pixels: int
    """Of an output, of a transposed convolution the input: up to so many are rows of a linear layer."""
    orthonormal_rows: int
    """``ORTHONORMAL_ROWS``, which is asked without the library, too."""


@functools.cache
def bounds() -> Bounds:
    """Of the library, which is there."""
    return Bounds(*torch.ops.wnfused_native.cpu_bounds())


def takes_few_pixels(v: Tensor, groups: int, transposed: bool) -> bool:
    """Whether convolutions of up to ``bounds().few_pixels`` pixels are linear layers here."""
    if v.dtype != torch.float32 or not v.is_cpu or groups > 1:
        return False
    outputs, inputs, *kernel = v.shape
    window = [*[1] * (3 - len(kernel)), *kernel]
    maps, one, none = [1, inputs, outputs, *window], [1, 1, 1], [0, 0, 0]
    ways = torch.ops.wnfused_native.cpu_conv_ways(maps, window, one, none, one, 1, len(kernel), transposed)
    return bool(ways[0] == "unfolded")


def takes_linear(v: Tensor) -> bool:
    """Whether a linear layer is multiplied here, and faster than a plain one for any number of rows.

    The instruction sets are those of ``panel_kernels()`` (``csrc/cpu/ops/linear_panels.cpp``), up to the length of row
    that they take, and for longer rows and bfloat16 of ``linear_kernels()`` (``linear_products.cpp``). Where rows end
    within a tile's depth, oneDNN reads on behind them.
    """
    if not v.is_cpu or v.shape[0] < 2:
        return False
    isa = instruction_set()
    if v.dtype == torch.bfloat16:
        return (isa == "avx512_bf16" and v.numel() >= 2**16) or (isa == "amx" and v.shape[1] % 32 != 0)
    longest = 2**12 if isa == "avx2" else math.inf
    return v.dtype == torch.float32 and isa in ("amx", "avx512_bf16", "avx512", "avx2") and v.shape[1] <= longest


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    if any(tensor.is_cuda for tensor in tensors_of(arguments)):
        return native_cuda.refusal(op, arguments)
    reason = unavailable()
    if reason is not None:
        return reason
    if op not in globals():
        return f"it has no kernel for {op}"
    known = _STAGE_DTYPES if op.startswith("residual_stage") else _DTYPES
    for tensor in operands_of(op, arguments):
        if not tensor.is_cpu:
            return f"it has no kernel for device {tensor.device.type!r}"
        if tensor.dtype not in known:
            return f"it has no kernel for {tensor.dtype}"
    return None


def residual_stage(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float = 1.0, recompute: int = 0, save: bool = True
) -> tuple[Tensor, ...]:  # fmt: skip
    if x.is_cuda:
        return native_cuda.residual_stage(x, v, g, bias, skip_scale, recompute, save)
    return torch.ops.wnfused_native.residual_stage(x, v, g, bias, skip_scale, recompute, save)


def residual_stage_backward(
    dy: Tensor, v: Tensor, g: Tensor, bias: Tensor, norm: Tensor, maps: Tensor, skip_scale: float = 1.0,
    recompute: int = 0, parameters: bool = True, signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if dy.is_cuda:
        return native_cuda.residual_stage_backward(dy, v, g, bias, norm, maps, signs, skip_scale, recompute, parameters)
    return torch.ops.wnfused_native.residual_stage_backward(
        dy, v, g, bias, norm, maps, skip_scale, recompute, parameters
    )


ORTHONORMAL_ROWS = 256
"""How many rows the kernel of ``orthonormal_rows_`` takes at most."""


def orthonormal_rows_(a: Tensor) -> Tensor:
    """Replaces each matrix of float32 ``a [n, r, c]`` on the CPU by Q of ``A = L Q``; True ``[n]`` where it could."""
    return torch.ops.wnfused_native.orthonormal_rows_(a)


# The layers. One kernel runs what is common: rows along dim 0, float32 or bfloat16. Everything else is composed.

FUSED_DTYPES = (torch.float32, torch.bfloat16)
"""Of ``x``; the parameters have the same, or float32."""

_ACTIVATION = native_composed.ACTIVATION_NUMBERS


def _is_fused(x: Tensor, v: Tensor, dim: int | None) -> bool:
    """Parameters have the dtype of ``x`` or float32, so what is left to exclude is float16 and float64; on a GPU, what
    ``refusal`` lets pass is."""
    return x.is_cuda or (x.dtype in FUSED_DTYPES and (dim == 0 or dim == -v.dim()))


def linear(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not _is_fused(x, v, dim):
        return native_composed.linear(x, v, g, bias, residual, dim, activation, negative_slope)
    return torch.ops.wnfused_native.linear.default(x, v, g, bias, residual, _ACTIVATION[activation], negative_slope)


def linear_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool],
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not _is_fused(x, v, dim):
        return native_composed.linear_backward(dy, y, x, v, g, norm, needs, dim, activation, negative_slope)
    found = torch.ops.wnfused_native.linear_backward.default(
        dy, y, x, v, g, norm, bits_of(needs), _ACTIVATION[activation], negative_slope
    )
    return given(found, dy)


def conv(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not _is_fused(x, v, dim):
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        return native_composed.conv(x, v, g, bias, residual, *geometry, dim, activation, negative_slope)
    if transposed:
        return torch.ops.wnfused_native.conv_transpose.default(
            x, v, g, bias, residual, stride, padding, dilation, output_padding, groups, _ACTIVATION[activation],
            negative_slope,
        )  # fmt: skip
    return torch.ops.wnfused_native.conv.default(
        x, v, g, bias, residual, stride, padding, dilation, groups, _ACTIVATION[activation], negative_slope
    )


def conv_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool], stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not _is_fused(x, v, dim):
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        return native_composed.conv_backward(dy, y, x, v, g, norm, needs, *geometry, dim, activation, negative_slope)
    kernels = torch.ops.wnfused_native
    op = kernels.conv_transpose_backward if transposed else kernels.conv_backward
    extra = (output_padding,) if transposed else ()
    found = op.default(
        dy, y, x, v, g, norm, bits_of(needs), stride, padding, dilation, *extra, groups, _ACTIVATION[activation],
        negative_slope,
    )  # fmt: skip
    return given(found, dy)
