"""The C++ backend on CUDA tensors: the library ``_cuda``, what it takes and what it refuses.

It has the row norm, the whole residual stage, linear layers of few samples, and what stands beside the vendor's product
of a single layer, which ``csrc/autograd/vendor.cpp`` calls: so layers need the library ``_autograd``, too.
The schemas stand in ``wnfused.backends.native_schemas``.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wnfused._numbers import flag
from wnfused.backends import LEAST_CAPABILITY, allows_tf32, operands_of, row_dim
from wnfused.backends.library import opened

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_STAGE_DTYPES = (torch.float32, torch.bfloat16)
_LAYER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAYERS = ("linear", "linear_backward", "conv", "conv_backward")
_OPS = ("weight_norm", "weight_norm_backward", "residual_stage", "residual_stage_backward", *_LAYERS)


@functools.cache
def unavailable() -> str | None:
    """Opens the library; the reason if it cannot run on any device here."""
    if torch.version.cuda is None:
        return "torch is a CPU build"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return opened("cuda") or _driver_too_old(
        torch.ops.wnfused_native.cuda_toolkit_version(), torch.ops.wnfused_native.cuda_driver_version()
    )


def _driver_too_old(toolkit: int, driver: int) -> str | None:
    """Within a major version any driver runs the machine code that the build carries; an older one runs none."""
    return None if driver // 1000 >= toolkit // 1000 else _too_old_for(toolkit, driver)


def _too_old_for(toolkit: int, driver: int) -> str:
    return (
        f"it was built with CUDA {_release(toolkit)}, which the driver, of CUDA {_release(driver)}, is too old for; "
        f"update the driver or build with an older toolkit"
    )


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    """Why it cannot run ``op`` on these arguments, some of which are on a CUDA device; None if it can."""
    reason = unavailable()
    if reason is not None:
        return reason
    if op not in _OPS:
        return f"it has no CUDA kernel for {op}"
    tensors = list(operands_of(op, arguments))
    kind = op.removesuffix("_backward")
    reason = (
        _mixed_devices(tensors)
        or _refused_dtype(tensors, {"weight_norm": _DTYPES, "residual_stage": _STAGE_DTYPES}.get(kind, _LAYER_DTYPES))
        or refused_device(tensors[0].device.index)
    )
    if reason is not None:
        return reason
    if op in _LAYERS:
        return layers_unavailable(tensors[0].device.index) or _refused_layer(op, arguments)
    if kind == "residual_stage":
        return _refused_shape(*tensors[:2])
    return _refused_rows(tensors[0], row_dim(op, arguments))


def _mixed_devices(tensors: Sequence[Tensor]) -> str | None:
    devices = sorted({str(t.device) for t in tensors})
    return None if len(devices) == 1 else f"its arguments are on different devices: {', '.join(devices)}"


def _refused_dtype(tensors: Sequence[Tensor], known: Sequence[torch.dtype]) -> str | None:
    return next((f"it has no CUDA kernel for {t.dtype}" for t in tensors if t.dtype not in known), None)


@functools.cache
def refused_device(index: int) -> str | None:
    """Why no kernel of the library runs on a device; None if they do."""
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < LEAST_CAPABILITY:
        return "its CUDA kernels need compute capability {}.{}, cuda:{} has {}.{}".format(
            *LEAST_CAPABILITY, index, major, minor
        )
    newest, toolkit, driver = _build()
    # Machine code is for one major capability. For a later one the driver compiles the build's PTX, which it
    # understands up to its own release, minor version included.
    if major <= newest // 10 or driver >= toolkit:
        return None
    return (
        f"cuda:{index}, of compute capability {major}.{minor}, is newer than its machine code, and "
        f"{_too_old_for(toolkit, driver)}"
    )


def _build() -> tuple[int, int, int]:
    """The newest architecture that the library has machine code for, as 90 for 9.0; its toolkit's version, and the
    driver's."""
    ops = torch.ops.wnfused_native
    return ops.cuda_newest_architecture(), ops.cuda_toolkit_version(), ops.cuda_driver_version()


_PRECISIONS = ("bfloat16", "tf32", "float32")


def _precision(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bfloat16 else 1 if allows_tf32("conv") else 2


@functools.cache
def _shapes(precision: int, device: int) -> tuple[str, ...]:
    """``"CxHxW"`` of the stages that a device runs; shared memory differs between architectures."""
    return tuple(torch.ops.wnfused_native.cuda_stage_shapes(precision, device).split())


def use_warpgroup_stage(on: bool) -> None:
    """Whether stages of 64 channels on 8 x 8 maps and of 32 on 16 x 16 run by wgmma on devices of capability 9.0, in
    this process: those in bfloat16 and in tf32.

    Off unless it is called: these kernels pass in emulation and compile, and have not run on a GPU yet. Every other
    stage and device runs as before. Sums are rounded in another order, so results differ from the other kernels' in
    that.

    Raises:
        TypeError: ``on`` is not True or False.
        RuntimeError: the CUDA library cannot be used, or no device has capability 9.0.
    """
    flag(on=on)
    reason = unavailable()
    if reason is None:
        capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        has = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        reason = None if (9, 0) in capabilities else f"it takes a device of capability 9.0; here is {has}"
    if reason is not None:
        raise RuntimeError(f"use_warpgroup_stage: {reason}")
    torch.ops.wnfused_native.set_cuda_warpgroup_stage(on)


_MOST = 2**24  # what the kernels count in 32 bits with room to spare


def _refused_shape(x: Tensor, v: Tensor) -> str | None:
    n, c, h, w = x.shape
    if n >= _MOST or v.shape[0] >= _MOST:
        return f"its stage takes less than {_MOST} images and blocks"
    precision = _precision(x.dtype)
    shapes = _shapes(precision, x.device.index)
    if f"{c}x{h}x{w}" in shapes:
        return None
    return (
        f"its {_PRECISIONS[precision]} stage has no CUDA kernel for {c} channels on {h} x {w} maps; "
        f"here it has {', '.join(shapes)}"
    )


@functools.cache
def _has_stage(precision: int, device: int, channels: int, height: int, width: int) -> bool:
    return f"{channels}x{height}x{width}" in _shapes(precision, device)


def takes_stage(dtype: torch.dtype, x: Tensor, v: Tensor, g: Tensor, bias: Tensor) -> bool:
    """Whether the library runs a stage as it is on CUDA tensors, ``x`` in ``dtype``: what ``refusal`` says, in less of
    the host's time, and nothing to put in order first."""
    known = (dtype, torch.float32)
    if unavailable() is not None or dtype not in _STAGE_DTYPES or x.dim() != 4 or not x.numel():
        return False
    if not all(t.is_cuda and t.device == x.device and t.dtype in known and t.is_contiguous() for t in (v, g, bias)):
        return False
    index = x.device.index
    few = x.shape[0] < _MOST and v.shape[0] < _MOST
    return few and refused_device(index) is None and _has_stage(_precision(dtype), index, *x.shape[1:])


@functools.cache
def layers_unavailable(device: int) -> str | None:
    """Why the C++ libraries have no single layers on a CUDA device, None if they have: the kernel beside the product is
    in one, the layer in that which fits one torch, and both open after that of the CPU."""
    return opened("cpu") or opened("autograd") or unavailable() or refused_device(device)


def takes_layer(dtype: torch.dtype, x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None) -> bool:
    """Whether the C++ libraries take a linear layer or convolution on CUDA tensors, normalised along dim 0 and not
    transposed, of ``x`` in ``dtype``: what ``refusal`` says, in less of the host's time."""
    return fits_layer(dtype, x, v, g, bias) and layers_unavailable(x.device.index) is None


def fits_layer(dtype: torch.dtype, x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None) -> bool:
    """Whether they would take it where they are at hand."""
    known = (dtype, torch.float32)
    return (
        x.is_cuda
        and dtype in _LAYER_DTYPES
        and v.dtype in known
        and g.dtype is v.dtype
        and (bias is None or bias.dtype in known)
        and x.numel() > 0
        and v.numel() > 0
    )


_WINDOW = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_FORWARD = ("x", "v", "g", "bias", "residual")
_BACKWARD = ("dy", "y", "x", "v", "g", "norm", "needs")


def _refused_layer(op: str, arguments: Sequence[Any]) -> str | None:
    tensors = _BACKWARD if op.endswith("_backward") else _FORWARD
    given = dict(zip((*tensors, *(_WINDOW if op.startswith("conv") else ()), "dim"), arguments, strict=False))
    x, v, bias, dim = given["x"], given["v"], given.get("bias"), given.get("dim", 0)
    if given.get("transposed"):
        return "it has no transposed convolution of CUDA tensors"
    if dim is None or dim % v.dim() != 0:
        return f"its layers of CUDA tensors are normalised along dim 0, not {dim}"
    if takes_layer(x.dtype, x, v, given["g"], bias):
        return None
    if not x.numel() or not v.numel():
        return "its layers of CUDA tensors take no empty ones"
    return f"its layers' parameters have one dtype, that of x or float32, and not {v.dtype} where x has {x.dtype}"


_MOST_ROWS = 2**31 - 1  # a grid's blocks, one or more of which take a row


def _refused_rows(v: Tensor, dim: int | None) -> str | None:
    rows = 1 if dim is None else v.shape[dim]
    return None if rows <= _MOST_ROWS else f"its row norm takes up to {_MOST_ROWS} rows, and there are {rows}"


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Running out of memory inside an op is torch's own error: no C++ library can throw that type.

    Before torch 2.13 all that is known is the call that failed. One that makes a tensor fails for that, or for what an
    earlier kernel did, which the device then says itself.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        unnamed = re.search(r"empty.* failed at ", said)
        if unnamed and not torch.cuda.is_current_stream_capturing():  # a capture allows no waiting
            torch.cuda.synchronize()
        if unnamed or "out of memory" in said:
            raise torch.OutOfMemoryError(said) from error
        raise


@memory_errors()
def weight_norm(v: Tensor, g: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(v.dtype, g.dtype)  # float32 gains of half-precision directions are not rounded
    w, norm = torch.ops.wnfused_native.weight_norm(v.to(wide), g.to(wide).contiguous(), -1 if dim is None else dim)
    return w.to(v.dtype), norm


@memory_errors()
def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(v.dtype, g.dtype)
    dv, dg = torch.ops.wnfused_native.weight_norm_backward(
        dw.to(wide), v.to(wide), g.to(wide).contiguous(), norm.contiguous(), -1 if dim is None else dim
    )
    return dv.to(v.dtype), dg.to(g.dtype).reshape(g.shape)


@memory_errors()
def residual_stage(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, recompute: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(y, norm, maps, signs)``: the backward reads the ReLU's mask off ``signs``, a bit a value, not off the map."""
    return torch.ops.wnfused_native.cuda_residual_stage(x, v, g, bias, skip_scale, recompute, save, allows_tf32("conv"))


@memory_errors()
def residual_stage_backward(
    dy: Tensor, v: Tensor, g: Tensor, bias: Tensor, norm: Tensor, maps: Tensor, signs: Tensor | None, skip_scale: float,
    recompute: int, parameters: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if signs is None:
        raise ValueError("signs must be given: the fourth output of residual_stage on a CUDA device")
    return torch.ops.wnfused_native.cuda_residual_stage_backward(
        dy, v, g, bias, norm, maps, signs, skip_scale, recompute, parameters, allows_tf32("conv")
    )
