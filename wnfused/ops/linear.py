"""``linear``: row norm, gain, matrix product, bias, residual and activation as one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from wnfused import reference
from wnfused.backends import native_autograd
from wnfused.backends.asked import asked_of
from wnfused.ops import _arguments as arguments
from wnfused.ops import _products
from wnfused.ops._direct import CODES, FIRST_DIM, layer
from wnfused.ops._registration import below_autograd, define, differentiable


def _fake(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norm = v.new_empty([] if dim is None else [v.shape[dim]], dtype=reference.wide(v.dtype))
    return x.new_empty([*x.shape[:-1], v.shape[0]]), norm


GRADIENTS_LIKE = (2, 3, None, None, 0)
"""``dx, dv, dg, dbias, dz`` keep the memory formats of ``x``, ``v`` and ``dy`` among the backward's arguments."""


def _fake_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool],
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return fake_layer_gradients(dy, x, v, g, v.shape[0], needs, activation)


def fake_layer_gradients(
    dy: Tensor, x: Tensor, v: Tensor, g: Tensor, features: int, needs: list[bool], activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shapes of ``(dx, dv, dg, db, dz)``, empty where not needed; shared with the convolution."""
    return (
        torch.empty_like(x, memory_format=reference.suggest_memory_format(x)) if needs[0] else dy.new_empty(0),
        torch.empty_like(v, memory_format=reference.suggest_memory_format(v)) if needs[1] else dy.new_empty(0),
        g.new_empty(g.shape) if needs[1] else dy.new_empty(0),
        v.new_empty([features]) if needs[2] else dy.new_empty(0),
        torch.empty_like(dy, memory_format=reference.suggest_memory_format(dy))
        if needs[3] and activation != "none"
        else dy.new_empty(0),
    )


_op = define(
    "linear(Tensor x, Tensor v, Tensor g, Tensor? bias=None, Tensor? residual=None, int? dim=0, "
    "str activation='none', float negative_slope=0.01) -> (Tensor y, Tensor norm)",
    _fake,
    in_cpp=True,
)
_op_backward = define(
    "linear_backward(Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, bool[] needs, int? dim=0, "
    "str activation='none', float negative_slope=0.01) "
    "-> (Tensor dx, Tensor dv, Tensor dg, Tensor dbias, Tensor dz)",
    _fake_backward,
    like=GRADIENTS_LIKE,
    in_cpp=True,
)


def layer_backward(
    op: torch._ops.OpOverload,
    dy: Tensor,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Gradients of ``x, v, g, bias, residual`` of a layer whose further arguments the backward op takes as they are."""
    x, v, g, bias, _, *rest = inputs
    y, norm = outputs
    activation = rest[-2]
    asked = asked_of(*needs[:5])
    dx, dv, dg, db, dz = below_autograd(op, (dy, dy if y is None else y, x, v, g, norm, asked, *rest))
    dresidual = dy if activation == "none" else dz
    db = db if bias is None or not needs[3] else db.to(bias.dtype)
    found = (dx, dv, dg, db, dresidual)
    return [gradient if needed else None for gradient, needed in zip(found, needs[:5], strict=True)]


def _backward(
    dy: Tensor, inputs: Sequence[Any], outputs: Sequence[Any], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    return layer_backward(_op_backward, dy, inputs, outputs, needs)


def _direct_reference(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, v, g, bias, residual, code, slope = inputs
    return reference.linear(x, v, g, bias, residual, 0, reference.ACTIVATIONS[code], slope)


_direct = layer("linear", _direct_reference)

# Layers of another norm have a fast path, too: no kernel runs them whole, but what they are composed of is called in
# C++ (csrc/autograd/linear_of_norm.cpp). ``dim`` as there; any other takes the long way.
WHOLE, LAST_DIM = -1, 1


def _reference_of_norm(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, v, g, bias, residual, dim, code, slope = inputs
    return reference.linear(x, v, g, bias, residual, None if dim < 0 else dim, reference.ACTIVATIONS[code], slope)


def _is_composed(x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    given = (t for t in (x, v, g, bias, residual) if t is not None)
    return (
        native_autograd.unavailable() is None
        and all(t.is_cpu and t.dtype == torch.float32 for t in given)
        and v.dim() == 2
        and v.numel() > 0
        and v.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


_composed = (torch.ops.wnfused_autograd.composed_linear, torch.ops.wnfused_autograd.composed_linear_backward)
_direct_of_norm = layer(
    "linear_of_norm", _reference_of_norm, tuple(op.default._op for op in _composed), takes=_is_composed
)
_call = differentiable(
    _op,
    reference=reference.linear,
    backward=_backward,
    reads_output=lambda inputs: inputs[-2] != "none",
    transformed=_products.linear,
)


def linear(
    x: Tensor,
    v: Tensor,
    g: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    dim: int | None = 0,
) -> Tensor:
    """``y = act(x w^T + bias + residual)`` with ``w_i = g_i v_i / ||v_i||_2``.

    Args:
        x: ``[..., in_features]``.
        v: directions ``[out_features, in_features]``; the dtype of ``x``, or float32 with a half-precision ``x``.
        g: gain of each row, ``[out_features, 1]`` or ``[out_features]`` (``dim=0``).
        bias: ``[out_features]`` or None.
        activation: None, ``"relu"`` or ``"leaky_relu"`` with ``negative_slope`` >= 0.
        residual: added before the activation; the shape of ``y``.
        dim: the dim of ``v`` that numbers the normalised rows; None for one norm over ``v``.

    Returns:
        ``[..., out_features]`` in the dtype of ``x``, or autocast's.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: Arpit, Campos & Bengio 2019, eq. 1 and 2.
    """
    try:
        code = CODES.get(activation)
    except TypeError:  # a list, say; the check names it
        code = None
    if code is not None and (dim is FIRST_DIM or dim is None or dim is LAST_DIM):
        try:
            if dim is FIRST_DIM:
                y = _direct(x, v, g, bias, residual, code, negative_slope)
            else:
                y = _direct_of_norm(x, v, g, bias, residual, WHOLE if dim is None else dim, code, negative_slope)
        except (RuntimeError, TypeError):
            _checked(x, v, g, bias, residual, dim, activation, negative_slope)
            raise
        if y is not None:
            return y
    tensors = (x, v, g, bias, residual)
    if arguments.has_override(tensors):
        return handle_torch_function(
            linear, tensors, x, v, g, bias,
            activation=activation, negative_slope=negative_slope, residual=residual, dim=dim,
        )  # fmt: skip
    return _call(*_checked(x, v, g, bias, residual, dim, activation, negative_slope))[0]


@arguments.quiet_in_a_trace
def _checked(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, dim: int | None,
    activation: str | None, negative_slope: float,
) -> tuple[Any, ...]:  # fmt: skip
    """The op's arguments."""
    arguments.floating("x", x)
    x = arguments.autocast(x)
    v, g, bias = arguments.beside_autocast(x, v, g, bias)
    arguments.directions(v, x)
    if v.dim() != 2:
        raise ValueError(f"v: shape {list(v.shape)} is not [out_features, in_features]")
    if x.dim() == 0 or x.shape[-1] != v.shape[1]:
        raise ValueError(f"x: shape {list(x.shape)} does not end in in_features = {v.shape[1]}")
    arguments.matches("g", g, x)
    arguments.gain(g, v, dim)
    arguments.bias(bias, v.shape[0], x)
    if residual is not None:
        residual = arguments.residual(residual, [*x.shape[:-1], v.shape[0]], x)
    activation = arguments.activation(activation, negative_slope)
    return x, v, g, bias, residual, dim, activation, float(negative_slope)
