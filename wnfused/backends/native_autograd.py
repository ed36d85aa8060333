"""Layers and stages whose autograd nodes are in C++: the schemas of ``csrc/autograd``, and what that library calls back
for.

The library also has the single layers of CUDA tensors, which ``wnfused.backends.native`` declares.

It fits one version of torch, as autograd is no part of the stable ABI. Where it was not built, or for another version,
``wnfused.ops`` records nodes of its own, which do the same; only small layers and stages are slower then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from wnfused._numbers import flag
from wnfused.backends import native
from wnfused.backends.library import opened

_library = torch.library.Library("wnfused_autograd", "DEF")

_GEOMETRY = "int[] stride, int[] padding, int[] dilation, "
_CONSTANTS = {
    name: f"{geometry}int activation, float negative_slope"
    for name, geometry in (
        ("linear", ""),
        ("linear_of_norm", "int dim, "),
        ("conv", f"{_GEOMETRY}int groups, "),
        ("conv_transpose", f"{_GEOMETRY}int[] output_padding, int groups, "),
    )
}
_GRADIENTS = "(Tensor? dx, Tensor? dv, Tensor? dg, Tensor? dbias, Tensor? dresidual)"

for _name, _constants in _CONSTANTS.items():
    _layer = f"Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, {_constants}"
    _library.define(f"{_name}({_layer}) -> Tensor y")
    # needs: a bit for each of x, v, g, bias and residual.
    _library.define(
        f"{_name}_gradients(Tensor dy, Tensor? y, Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, "
        f"Tensor norm, int needs, {_constants}) -> {_GRADIENTS}"
    )
_library.define("weight(Tensor v, Tensor g, int dim) -> (Tensor w, Tensor norm)")
_library.define("weight_backward(Tensor dw, Tensor v, Tensor g, Tensor norm, int dim) -> (Tensor dv, Tensor dg)")
_BACKWARD = "Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, int needs"
# dim is -1 for one norm of all of v.
_layer = f"Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, {_CONSTANTS['linear_of_norm']}"
_library.define(f"composed_linear({_layer}) -> (Tensor y, Tensor norm)")
_library.define(f"composed_linear_backward({_BACKWARD}, {_CONSTANTS['linear_of_norm']}) -> {_GRADIENTS}")
# What wnfused_native::linear and conv are on CUDA tensors, for tests on the CPU.
for _name in ("linear", "conv"):
    _layer = f"Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, {_CONSTANTS[_name]}"
    _library.define(f"vendor_{_name}({_layer}) -> (Tensor y, Tensor norm)")
    _library.define(f"vendor_{_name}_backward({_BACKWARD}, {_CONSTANTS[_name]}) -> {_GRADIENTS}")
_STAGE = "Tensor x, Tensor v, Tensor g, Tensor bias, "
_STAGE_CONSTANTS = "float skip_scale, int recompute"
_library.define(f"residual_stage({_STAGE}{_STAGE_CONSTANTS}) -> Tensor y")
_library.define(
    f"residual_stage_gradients(Tensor dy, {_STAGE}int needs, {_STAGE_CONSTANTS}) "
    "-> (Tensor? dx, Tensor? dv, Tensor? dg, Tensor? dbias)"
)
_library.define("use_small_linear(bool on) -> bool before")
# Whether cuDNN is to be deterministic; each True is taken back by a False.
_library.define("ask_for_deterministic(bool on) -> ()")


@functools.cache
def unavailable() -> str | None:
    """Opens the library; the reason if there is none or it does not load."""
    return native.unavailable() or opened("autograd")


def use_small_linear(on: bool) -> bool:
    """Whether linear layers of few samples on CUDA tensors run by kernels of their own, in this process.

    They do unless it is called: float32 or bfloat16 inputs of up to 256 samples, up to 4096 features in, a multiple of
    8, and out, a multiple of 4, and no more products than one launch forward and one backward are expected to gain on
    (``csrc/autograd/small_linear.cpp``). Off: the weight is scaled and rounded to the input's dtype, and the product is
    cuBLAS's, with an activation in three launches and four. Results of the two differ in how they are rounded.

    Returns:
        What it was before.

    Raises:
        TypeError: ``on`` is not True or False.
        RuntimeError: the C++ library of single layers cannot be used.
    """
    flag(on=on)
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(f"use_small_linear: {reason}")
    before: bool = torch.ops.wnfused_autograd.use_small_linear(on)
    return before


def layer(name: str, gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The op that runs a layer, or a stage, and records it.

    Args:
        name: one of ``linear``, ``linear_of_norm``, ``conv``, ``conv_transpose``, ``residual_stage``.
        gradients: what gives the gradients that no kernel does, by the arguments of ``<name>_gradients``.
    """
    _library.impl(f"{name}_gradients", gradients, "CompositeImplicitAutograd")
    recorded: Callable[..., Any] = getattr(torch.ops.wnfused_autograd, name).default._op
    return recorded
