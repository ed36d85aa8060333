"""The fast path of a layer to its C++ kernel, for plain eager calls on CPU and CUDA tensors.

A small layer's time is Python's: the checks, the choice of a backend and the two trips through torch's dispatcher cost
several times the arithmetic of 64 features, and on a GPU more than the kernels of all but the widest layers. Where
nothing watches a call and the C++ kernel is what ``wnfused.dispatch`` would choose, the public functions hand their
arguments straight to it. The kernel checks them itself; only where it refuses are they checked again in Python, for an
error that names the argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from wnfused import dispatch
from wnfused.backends import native, native_autograd, native_cuda, native_entry
from wnfused.backends.triton import strategy
from wnfused.ops._arguments import PLAIN, autocast, below_autocast
from wnfused.ops._nodes import Gradients, python_node
from wnfused.reference import ACTIVATIONS

CODES = {None if name == "none" else name: number for number, name in enumerate(ACTIVATIONS)}
"""The kernels' numbers of the activations, by the names that layers have for them."""

FIRST_DIM = 0
"""What ``dim`` is on the fast path; asked by ``is``, as False and 0.0 are equal to it, too."""

_OPTIONAL = PLAIN | {type(None)}


def is_open(x: Any, v: Any, g: Any, bias: Any, residual: Any) -> bool:
    """Whether a call may take the fast path to the kernels for CPU tensors: plain ones, the native backend, nothing
    that watches, or that casts to another dtype than the kernels have."""
    return (
        is_plain_call(x, v, g, bias, residual)
        and x.dtype in native.FUSED_DTYPES
        and x.is_cpu
        and dispatch.prefers_native()
        and (not torch._C._is_any_autocast_enabled() or _casts_to_open(v, g, bias))
    )


def is_open_to_layers(name: str, x: Any, v: Any, g: Any, bias: Any, residual: Any) -> bool:
    """The same of linear layers and convolutions, which have a fast path for CUDA tensors, too. Where these libraries
    alone are missing, that is announced: a call that goes by ``dispatch.order`` does not ask for them."""
    if not isinstance(x, Tensor) or not x.is_cuda:
        return is_open(x, v, g, bias, residual)
    plain = _prefers_native_layers() and is_plain_call(x, v, g, bias, residual)
    if not plain or not native_cuda.fits_layer(_cast(x), x, v, g, bias):
        return False
    reason = native_cuda.layers_unavailable(x.device.index)
    if reason is not None:
        dispatch.pass_over(name, "native", reason)
    return reason is None


def _is_chosen(x: Tensor) -> bool:
    """Whether ``wnfused.dispatch`` and what else there is to choose leave a layer to the C++ libraries."""
    if x.is_cuda:
        return _prefers_native_layers() and native_cuda.layers_unavailable(x.device.index) is None
    return dispatch.prefers_native()


def _prefers_native_layers() -> bool:
    """Of CUDA tensors, where the libraries are at hand."""
    return dispatch.prefers_native_on_cuda() and strategy.leaves_the_choice()


def runs_where_recorded(x: Any, v: Any, g: Any, bias: Any, residual: Any) -> bool:
    """Whether a layer on the CPU runs where it is recorded, as torch's own product with the effective weight, whose op
    is in C++ (``csrc/autograd/composed_layer.h``): in float64, which no kernel has, and under the transforms of
    ``torch.func``, which none knows."""
    transformed = torch._C._are_functorch_transforms_active()
    if not _is_unwatched(x, v, g, bias, residual) or not (transformed or forward_ad._current_level < 0):
        return False
    narrow = transformed and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return (
        (narrow or x.dtype == torch.float64)
        and all(t is None or (t.dtype == x.dtype and t.is_cpu) for t in (x, v, g, bias, residual))
        and v.numel() > 0
        and dispatch.prefers_native()
        and native_autograd.unavailable() is None
    )


def is_open_to_stages(x: Any, v: Any, g: Any, bias: Any) -> bool:
    """The same of residual stages."""
    if isinstance(x, Tensor) and x.is_cuda:
        plain = bias is not None and is_plain_call(x, v, g, bias, None) and dispatch.prefers_native_on_cuda()
        return plain and native_cuda.takes_stage(_cast(x), x, v, g, bias)
    return is_open(x, v, g, bias, None)


def _cast(x: Tensor) -> torch.dtype:
    """What autocast makes of a CUDA tensor."""
    casts = torch.is_autocast_enabled("cuda") and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype("cuda") if casts else x.dtype


def is_plain_call(x: Any, v: Any, g: Any, bias: Any, residual: Any) -> bool:
    """Whether nothing but autograd and autocast would know of a call that goes past them."""
    return (
        _is_unwatched(x, v, g, bias, residual)
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def _is_unwatched(x: Any, v: Any, g: Any, bias: Any, residual: Any) -> bool:
    """Whether no compiler, subclass or mode sees a call, transforms aside."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and type(v) in PLAIN
        and type(g) in PLAIN
        and type(bias) in _OPTIONAL
        and type(residual) in _OPTIONAL
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and not (torch._C._len_torch_function_stack() and _is_seen_by_a_function_mode())
    )


def _is_seen_by_a_function_mode() -> bool:
    """Whether a mode for torch's functions is on that calls of layers are for. A default device is none."""
    on = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in on)


def _casts_to_open(*parameters: Any) -> bool:
    """Whether autocast casts inputs to a dtype of the kernels, and the parameters go with that."""
    return not torch.is_autocast_enabled("cpu") or (
        torch.get_autocast_dtype("cpu") in native.FUSED_DTYPES
        and all(p is None or p.dtype in native.FUSED_DTYPES for p in parameters)
    )


def by_entry(name: str, x: Any, *arguments: Any) -> Tensor | None:
    """``y`` by the function of ``native_entry``, recorded for autograd where that is on; None where that does not take
    the call, which may be open all the same. RuntimeError where the kernel refuses its arguments."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or not _is_chosen(x):
        return None
    entry = native_entry.layer(name)
    y: Tensor | None = None if entry is None else entry(x, *arguments)
    return y


def layer(
    name: str,
    reference: Callable[..., tuple[Tensor, ...]],
    kernels: tuple[Callable[..., Any], ...] = (),
    takes: Callable[..., bool] | None = None,
) -> Callable[..., Tensor | None]:
    """The callable for an op's fast path.

    Args:
        name: of the kernel; it takes ``x, v, g, bias, residual``, the constants of the layer, the activation's number
            and slope. ``name_backward`` takes ``dy, y, x, v, g, norm, needs`` and the same constants.
        reference: the same function of the same arguments in plain torch, for second derivatives.
        kernels: the two functions, for CPU tensors; those of the C++ library if there are none.
        takes: whether the kernels take the five tensors of a call that is plain; any, if there is none.

    Returns:
        A function of the kernel's arguments that gives ``y``, recorded for autograd where that is on, or None where the
        call may not take this path. It raises RuntimeError where the kernel refuses its arguments.
    """
    # The functions below torch.ops' own Python wrappers, which only hand over to them.
    names = () if kernels else (name, f"{name}_backward")
    kernel, kernel_backward = kernels or (getattr(torch.ops.wnfused_native, n).default._op for n in names)
    gradients = Gradients(name, kernel, kernel_backward, reference)
    record = python_node(name, gradients)
    record_natively = native_autograd.layer(name, gradients.of_native_node)
    opens = is_open if kernels else functools.partial(is_open_to_layers, name)

    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return kernel(*arguments)[0]
        return record_natively(*arguments) if native_autograd.unavailable() is None else record(*arguments)

    def call(x: Any, v: Any, g: Any, bias: Any, residual: Any, *constants: Any) -> Tensor | None:
        y = by_entry(name, x, v, g, bias, residual, *constants)
        if y is not None:
            return y
        tensors = (x, v, g, bias, residual)
        if runs_where_recorded(*tensors):
            return record_natively(*tensors, *constants)
        if not opens(*tensors) or not (takes is None or takes(*tensors)):
            return None
        if not torch._C._is_any_autocast_enabled():
            return run(x, v, g, bias, residual, *constants)
        residual = None if residual is None else autocast(residual)
        return below_autocast(run, autocast(x), v, g, bias, residual, *constants)

    return call
