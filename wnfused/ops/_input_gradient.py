"""The gradient by a layer's input, as a function that has a gradient of its own.

A gradient penalty or an eikonal term differentiates by the input first, then by the parameters through that:

    dx = w^T dz,    dz = act'(z) * dy                  (w^T: the layer's transpose)

is linear in ``dy`` and in ``w``. With ``c`` the cotangent of ``dx`` and ``e`` that of ``dz``, the residual's gradient,

    ddy = act'(z) * (w c + e),        dv, dg: the layer's own backward with ``c`` in the place of ``x``

so both are first-order kernels once more. By ``z`` the derivative is zero: the activations are piecewise linear. torch
carries such zeros on through the layers before, in full; here they are one number that ``is_zero_gradient`` knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wnfused.ops._registration import is_hooked, is_transformed
from wnfused.reference import ACTIVATIONS, activate_backward

Kernel = Callable[..., Any]
Reference = Callable[..., tuple[Tensor, ...]]


_LEAF: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Running(threading.local):
    """What is known of the backward that runs in a thread; the nodes of one device run in one."""

    def __init__(self) -> None:
        # By dtype and device. Zeros of an earlier backward may still be held by somebody: they are never used again.
        self.zeros: dict[tuple[torch.dtype, torch.device], tuple[int, Tensor]] = {}
        # The last that was asked for gradients of leaves by name, which torch tells by an error: at 30 us, that is to
        # happen once in a backward. Its other layers count as asked for, too.
        self.asked_for_leaves = -1


_running = _Running()


def zero_gradient(like: Tensor) -> Tensor:
    """Zeros in the place of the gradient of a layer's output, all those of one backward one number in memory."""
    backward = torch._C._current_graph_task_id()
    key = like.dtype, like.device
    known = _running.zeros.get(key)
    if known is None or known[0] != backward:
        known = _running.zeros[key] = backward, torch.zeros((), dtype=like.dtype, device=like.device)
    # Of one entry it would be no more guarded from writing in place than any tensor.
    return known[1].expand(like.shape) if like.numel() > 1 else torch.zeros_like(like)


def is_zero_gradient(dy: Tensor) -> bool:
    """Whether ``dy`` comes from this backward's ``zero_gradient``, and nothing was added to it."""
    known = _running.zeros.get((dy.dtype, dy.device))
    return known is not None and dy.data_ptr() == known[1].data_ptr() and known[0] == torch._C._current_graph_task_id()


def leaves_of(node: Any, inputs: Sequence[Any]) -> list[bool]:
    """Which of the inputs that a node was called with are leaves of the graph."""
    following = iter(node.next_functions)  # those of tensors alone
    return [t is not None and isinstance(next(following)[0], _LEAF) for t in inputs]


def zeros_through(
    inputs: Sequence[Tensor | None], needs: Sequence[bool], leaves: Sequence[bool]
) -> list[Tensor | None]:
    """What a layer whose output has a gradient of zeros hands on: zeros of one number to the layers before it.

    Leaves get tensors of their own, for what becomes a parameter's ``.grad`` will be written to.
    """
    return [
        None if not needed or t is None else torch.zeros_like(t) if leaf else zero_gradient(t)
        for t, needed, leaf in zip(inputs, needs, leaves, strict=True)
    ]


def is_of_input_alone(wanted: Sequence[bool]) -> bool:
    """Whether of a layer's ``x, v, g, bias`` and residual the gradient by ``x`` is wanted, and by no parameter."""
    return wanted[0] and not any(wanted[1:4])


def asks_for_input_alone(node: Any, needs: Sequence[bool]) -> bool:
    """Whether the running backward wants a layer's gradient by ``x``, and maybe by the residual, but by no parameter.

    Args:
        node: the layer's, whose first tensors are ``x, v, g`` and the bias if there is one.
        needs: which of these require a gradient; whether anyone asked for it, only the engine knows.
    """
    following = node.next_functions
    return needs[0] and not any(needs[i] and _will_run(following[i][0]) for i in (1, 2, 3))


def _will_run(node: Any) -> bool:
    backward = torch._C._current_graph_task_id()
    if backward == _running.asked_for_leaves:
        return True
    try:
        will: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was asked for
        _running.asked_for_leaves = backward
        return True
    return will


def input_gradient(name: str, kernel: Kernel, kernel_backward: Kernel, reference: Reference) -> Kernel:
    """The callable for a layer's ``dx`` and ``dz`` where a graph of them is asked for.

    Args:
        name, kernel, kernel_backward: as in ``wnfused.ops._direct.layer``.
        reference: the same layer in plain torch, for derivatives of a third order.

    Returns:
        A function of ``dy, v, g`` and ``y`` (None without an activation); of ``x, bias, residual, norm``, which are
        constants to it; of whether ``dz`` is wanted; and of the layer's constants. It gives ``dx`` and ``dz``, None
        where it is not wanted, or where it is ``dy`` itself.
    """

    class InputGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, dy: Tensor, v: Tensor, g: Tensor, y: Tensor | None, *others: Any) -> Any:
            x, _, _, norm, dz_too, constants = others
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(dy, v, g, y, *others[:4])
            ctx.constants = constants
            dx, _, _, _, dz = kernel_backward(dy, dy if y is None else y, x, v, g, norm, 1 + 8 * dz_too, *constants)
            return dx, dz

        @staticmethod
        def backward(ctx: Any, c: Tensor | None, e: Tensor | None) -> Any:
            dy, v, g, y, x, bias, residual, norm = ctx.saved_tensors
            *geometry, activation, slope = ctx.constants
            needs = ctx.needs_input_grad
            others = (None if y is None else zero_gradient(y), *(None,) * 6)
            if torch.is_grad_enabled() or is_transformed(c, e):
                return *_through_reference(reference, (dy, v, g), (x, bias, residual), ctx.constants, c, e), *others
            ddy = dv = dg = None
            if needs[0]:
                none = ACTIVATIONS.index("none")
                ddz: Any = e if c is None else kernel(c, v, g, None, e, *geometry, none, slope)[0]
                ddy = ddz if y is None else activate_backward(ddz, y, ACTIVATIONS[activation], slope)
            if c is not None and (needs[1] or needs[2]):
                _, dv, dg, _, _ = kernel_backward(dy, dy if y is None else y, c, v, g, norm, 2, *ctx.constants)
            return ddy, dv, dg, *others

    InputGradient.__name__ = InputGradient.__qualname__ = f"{name}_input_gradient"
    apply: Kernel = InputGradient.apply
    return apply


def _through_reference(
    reference: Reference, of: Sequence[Tensor], others: Sequence[Any], constants: Sequence[Any],
    c: Tensor | None, e: Tensor | None,
) -> Sequence[Tensor]:  # fmt: skip
    """The vector-Jacobian product of ``(dy, v, g) -> (dx, dz)`` with ``(c, e)``, with a graph of its own."""
    x, bias, residual = others
    added = torch.zeros_like(of[0]) if residual is None else residual
    given = (torch.zeros_like(x) if c is None else c, torch.zeros_like(of[0]) if e is None else e)

    def layer(x: Tensor, added: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return reference(x, v, g, bias, added, *constants)[0]

    if is_hooked():
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            dy, v, g = (t.view_as(t) for t in of)
            at = [t.detach().requires_grad_() for t in (x, added)]
            found = torch.autograd.grad(layer(at[0], at[1], v, g), at, dy, create_graph=True)
            return torch.autograd.grad(
                found, (dy, v, g), given, create_graph=graph, allow_unused=True, materialize_grads=True
            )

    def gradients(dy: Tensor, v: Tensor, g: Tensor) -> Sequence[Tensor]:
        pullback: Callable[..., Sequence[Tensor]] = torch.func.vjp(lambda x, added: layer(x, added, v, g), x, added)[1]
        return pullback(dy)

    pullback: Callable[..., Sequence[Tensor]] = torch.func.vjp(gradients, *of)[1]
    return pullback(given)
