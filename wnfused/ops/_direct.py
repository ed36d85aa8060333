"""The short way of a layer to its C++ kernel, for plain eager calls on CPU tensors.

A small layer's time is Python's: the checks, the choice of a backend and the two trips through torch's dispatcher cost
several times the arithmetic of 64 features. Where nothing watches a call and the C++ kernel is what
``wnfused.dispatch`` would choose, the public functions hand their arguments straight to it. The kernel checks them
itself; only where it refuses are they checked again in Python, for an error that names the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wnfused import dispatch
from wnfused.backends import native
from wnfused.ops._arguments import autocast
from wnfused.ops._input_gradient import asks_for_input_alone, input_gradient, is_zero_gradient, zeros_through
from wnfused.ops._registration import is_transformed, no_view, through_reference
from wnfused.reference import ACTIVATIONS

CODES = {None if name == "none" else name: number for number, name in enumerate(ACTIVATIONS)}
"""The kernels' numbers of the activations, by the names that layers have for them."""

# Multiply-adds of a product from which a weight's gradient costs far more than the question whether it is asked for.
_WORTH_ASKING = 2**25

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_OPTIONAL = frozenset((Tensor, torch.nn.Parameter, type(None)))


def is_open(x: Any, v: Any, g: Any, bias: Any, residual: Any) -> bool:
    """Whether a call may take the short way: plain CPU tensors, the native backend, nothing that watches, or that
    casts to another dtype than the kernels have."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and type(v) in _PLAIN
        and type(g) in _PLAIN
        and type(bias) in _OPTIONAL
        and type(residual) in _OPTIONAL
        and x.dtype in native.FUSED_DTYPES
        and x.is_cpu
        and dispatch.prefers_native()
        and (not torch._C._is_any_autocast_enabled() or _casts_to_open(v, g, bias))
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
    )


def _casts_to_open(*parameters: Any) -> bool:
    """Whether autocast casts inputs to a dtype of the kernels, and the parameters go with that."""
    return not torch.is_autocast_enabled("cpu") or (
        torch.get_autocast_dtype("cpu") in native.FUSED_DTYPES
        and all(p is None or p.dtype in native.FUSED_DTYPES for p in parameters)
    )


def below_autocast(run: Callable[..., Any], *arguments: Any) -> Any:
    """``run(*arguments)``, whose dtypes are settled: autocast must not touch what a kernel does inside."""
    if not torch._C._is_any_autocast_enabled():
        return run(*arguments)
    with torch._C._DisableAutocast():
        return run(*arguments)


def layer(
    name: str, reference: Callable[..., tuple[Tensor, ...]], kernels: tuple[Callable[..., Any], ...] = ()
) -> Callable[..., Tensor]:
    """The callable for an op's short way.

    Args:
        name: of the kernel; it takes ``x, v, g, bias, residual``, the constants of the layer, the activation's number
            and slope. ``name_backward`` takes ``dy, y, x, v, g, norm, needs`` and the same constants.
        reference: the same function of the same arguments in plain torch, for second derivatives.
        kernels: the two functions; those of the C++ library if there are none.

    Returns:
        A function of the kernel's arguments that gives ``y``, recorded for autograd where that is on. It raises
        RuntimeError where the kernel refuses its arguments.
    """
    # The functions below torch.ops' own Python wrappers, which only hand over to them.
    names = () if kernels else (name, f"{name}_backward")
    kernel, kernel_backward = kernels or (getattr(torch.ops.wnfused_native, n).default._op for n in names)
    gradient = input_gradient(name, kernel, kernel_backward, reference)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            x, v, g, bias, residual, *constants = arguments
            y, norm = kernel(*arguments)
            y = no_view(y)
            ctx.constants = constants
            # Without an activation the backward does not read y. The order is that of the op's own derivative: a
            # checkpoint may run the forward again under another backend.
            ctx.save_for_backward(x, v, g, bias, residual, y if constants[-2] else None, norm)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return below_autocast(backward_of, ctx, dy)

    def backward_of(ctx: Any, dy: Tensor) -> Any:
        x, v, g, bias, residual, y, norm = ctx.saved_tensors
        constants, needs = ctx.constants, ctx.needs_input_grad
        if is_transformed(dy):
            return through_reference(reference, dy, (x, v, g, bias, residual, *constants), needs)
        if torch.is_grad_enabled():
            if asks_for_input_alone(ctx, needs):
                constant = [None if t is None else t.detach() for t in (x, bias, residual)]
                dx, dz = gradient(dy, v, g, y, *constant, norm, needs[4], constants)
                dz = dy if needs[4] and y is None else dz
                return dx, None, None, None, dz, *(None,) * len(constants)
            return through_reference(reference, dy, (x, v, g, bias, residual, *constants), needs)
        if is_zero_gradient(dy):
            return tuple(zeros_through(ctx, (x, v, g, bias, residual, *constants)))
        products_are_many = dy.numel() * v.numel() >= _WORTH_ASKING * g.numel()
        if products_are_many and needs[0] and asks_for_input_alone(ctx, needs):
            needs = (True, False, False, False, needs[4])
        wanted = needs[0] + 2 * (needs[1] or needs[2]) + 4 * needs[3] + 8 * needs[4]
        *found, dresidual = kernel_backward(dy, dy if y is None else y, x, v, g, norm, wanted, *constants)
        if needs[4] and y is None:
            dresidual = dy
        return *found, dresidual, *(None,) * len(constants)

    Direct.__name__ = Direct.__qualname__ = name
    # torch.autograd.Function.apply itself: a look for functorch transforms, which is_open has seen to, and this.
    record = super(torch.autograd.Function, Direct).apply

    def run(*arguments: Any) -> Any:
        return record(*arguments) if torch.is_grad_enabled() else kernel(*arguments)[0]

    def call(x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, *constants: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return run(x, v, g, bias, residual, *constants)
        residual = None if residual is None else autocast(residual)
        return below_autocast(run, autocast(x), v, g, bias, residual, *constants)

    return call
