"""What every public op asks of its arguments, checked once, in words that name the argument and what is right."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from wnfused._numbers import plain_int
from wnfused.reference import ACTIVATIONS

P = ParamSpec("P")
R = TypeVar("R")

_HALVES = (torch.float16, torch.bfloat16)

PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""The types of tensors that nobody else answers for; a subclass may."""


def has_override(tensors: tuple[Any, ...]) -> bool:
    """Whether one of them has ``__torch_function__`` (a proxy of ``torch.fx``, a subclass), or a mode that has is on.

    Then the call is theirs, as with torch's own functions: ``torch.overrides.handle_torch_function`` makes it.
    """
    return not torch.compiler.is_compiling() and has_torch_function(tensors)


def quiet_in_a_trace(check: Callable[P, R]) -> Callable[P, R]:
    """``check`` without ``torch.jit.trace``'s warnings about sizes it reads: they only decide whether it raises."""

    @functools.wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is None:
            return check(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            return check(*args, **kwargs)

    return run


def floating(name: str, tensor: Tensor) -> None:
    """A real, dense floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got a nested one; use .to_padded_tensor(0.0)")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}; use .to_dense()")
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")


def matches(name: str, tensor: Tensor, x: Tensor, other: str = "x") -> None:
    """On the device of ``x``, and in its dtype or, where ``x`` is half precision, in float32.

    ``other``: what the caller calls ``x``.
    """
    if _is_like(tensor, x):
        return
    floating(name, tensor)
    if tensor.device != x.device:
        raise ValueError(f"{name}: on device {tensor.device}, but {other} is on {x.device}; move one of them")
    if not _dtypes_go(tensor, x):
        raise TypeError(
            f"{name}: dtype {tensor.dtype} does not go with {other} of {x.dtype}; use the dtype of {other}, "
            f"or float32 parameters with a half-precision {other}"
        )


def directions(v: Tensor, x: Tensor) -> None:
    """As ``matches``, but errors are about ``x``: a layer's ``v`` is not something that its caller gave."""
    if _is_like(v, x):
        return
    floating("v", v)
    if v.device != x.device:
        raise ValueError(f"x: on device {x.device}, but v (a layer's weight_v) is on {v.device}; move one of them")
    if not _dtypes_go(v, x):
        raise TypeError(
            f"x: dtype {x.dtype} does not go with v (a layer's weight_v) of {v.dtype}; cast one of them: "
            f"v has the dtype of x, or float32 with a half-precision x"
        )


def _is_like(tensor: Tensor, x: Tensor) -> bool:
    """Whether nothing is wrong with what goes along with ``x``: a dense tensor on its device, in its dtype."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype == x.dtype
        and tensor.device == x.device
        and tensor.layout == torch.strided
        and not tensor.is_nested
    )


def _dtypes_go(parameter: Tensor, x: Tensor) -> bool:
    return parameter.dtype == x.dtype or (parameter.dtype == torch.float32 and x.dtype in _HALVES)


def row_dim(dim: int | None) -> int | None:
    """The dim that numbers the normalised rows, an int of any kind as Python's own; or None for one norm over all."""
    if dim is None:
        return None
    plain: int = plain_int(dim)
    if not isinstance(plain, int) or isinstance(plain, bool):
        raise TypeError(f"dim: {dim!r} must be an int or None")
    return plain


def in_range(dim: int | None, t: Tensor, name: str) -> None:
    """``dim`` is one of ``t``'s, or None."""
    if dim is not None and not -t.dim() <= dim < t.dim():
        right = f"{-t.dim()} to {t.dim() - 1}, or None" if t.dim() else "None"
        raise ValueError(f"dim: {dim} is out of range for {name} of shape {list(t.shape)}; use {right}")


def gain(g: Tensor, v: Tensor, dim: int | None) -> None:
    """``g`` has one entry a row of ``v``, in torch's weight-norm shape or flat."""
    row_dim(dim)
    if dim == 0 and v.dim() and g.dim() in (1, v.dim()) and g.shape[0] == g.numel() == v.shape[0]:
        return
    in_range(dim, v, "v")
    rows = 1 if dim is None else v.shape[dim]
    keepdim = [1] * v.dim() if dim is None else [n if d == dim % v.dim() else 1 for d, n in enumerate(v.shape)]
    if list(g.shape) not in ([rows], keepdim, [] if dim is None else keepdim):
        raise ValueError(f"g: shape {list(g.shape)} does not fit v of {list(v.shape)}; use {keepdim} or {[rows]}")


def bias(b: Tensor | None, features: int, x: Tensor) -> None:
    if b is not None:
        matches("bias", b, x)
        if b.dim() != 1 or b.shape[0] != features:
            raise ValueError(f"bias: shape {list(b.shape)} does not fit; use [{features}]")


@quiet_in_a_trace
def maps(x: Tensor, channels: int, spatial: int) -> None:
    """Whether ``x`` has so many channels and spatial dims, with a batch or without."""
    if x.dim() not in (spatial + 1, spatial + 2) or x.shape[-spatial - 1] != channels:
        wanted = f"[N, {channels}, {', '.join('DHW'[-spatial:])}]"
        raise ValueError(f"x: shape {list(x.shape)} does not fit; use {wanted}, or the same without N")


def activation(name: str | None, negative_slope: float) -> str:
    """The op's own name of the activation."""
    fits = is_between("negative_slope", 0.0, negative_slope)
    if name is None:
        return "none"
    if not isinstance(name, str) or name not in ACTIVATIONS[1:]:
        raise ValueError(f"activation: unknown {name!r}; use None, 'relu' or 'leaky_relu'")
    # A negative slope would make the output's sign say nothing about the input's.
    if name == "leaky_relu" and not fits:
        raise ValueError(f"negative_slope: {negative_slope} must be finite and at least 0")
    return name


def is_between(name: str, least: float, value: float) -> bool:
    """Whether ``least <= value`` and both are finite; by comparisons alone, which a trace's symbols have, too."""
    try:
        return least <= value < math.inf
    except (TypeError, ValueError, RuntimeError):  # the last two are those of arrays and tensors of several numbers
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None


def below_autocast(run: Callable[..., Any], *arguments: Any) -> Any:
    """``run(*arguments)``, whose dtypes are settled: autocast must not touch what a kernel does inside."""
    if not torch._C._is_any_autocast_enabled():
        return run(*arguments)
    with torch._C._DisableAutocast():
        return run(*arguments)


# torch.amp.is_autocast_available would tell, but the compiler of torch 2.11 cannot trace it.
_WITHOUT_AUTOCAST = frozenset({"fpga", "hip", "ideep", "lazy", "meta", "mkldnn", "opencl", "opengl", "ve", "vulkan"})


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for a device type; some, such as meta, know none."""
    return device not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(device)


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which to the compiler of torch 2.11 is true of whatever it compiles."""
    return torch.compiler._is_exporting_flag


def autocast(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype where autocast is on, as torch casts a layer's input; float64 is left alone."""
    device = x.device.type
    if autocast_is_on(device) and x.dtype != torch.float64 and x.is_floating_point():
        return x.to(torch.get_autocast_dtype(device))
    return x


def beside_autocast(x: Tensor, *parameters: Any) -> tuple[Any, ...]:
    """Parameters, in float32 where they have another half precision than the one that autocast gave ``x``."""
    if x.dtype not in _HALVES or not autocast_is_on(x.device.type):
        return parameters
    return tuple(
        p.float() if isinstance(p, Tensor) and p.dtype in _HALVES and p.dtype != x.dtype else p for p in parameters
    )


def residual(r: Tensor, shape: list[int], x: Tensor) -> Tensor:
    """A residual of the output's shape, in the output's dtype."""
    floating("residual", r)
    r = autocast(r)
    if list(r.shape) != shape or r.device != x.device or r.dtype != x.dtype:
        raise ValueError(
            f"residual: {list(r.shape)}, {r.dtype}, {r.device} does not fit the output; "
            f"use {shape}, {x.dtype}, {x.device}"
        )
    return r
