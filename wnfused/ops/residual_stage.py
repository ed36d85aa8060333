"""``residual_stage``: every identity block of a residual stage as one op."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from wnfused import dispatch, reference
from wnfused._numbers import positive
from wnfused.backends import native_autograd, native_cuda
from wnfused.backends.asked import flags_of
from wnfused.ops import _arguments as arguments
from wnfused.ops import _products
from wnfused.ops._direct import by_entry, is_open_to_stages, runs_where_recorded
from wnfused.ops._input_gradient import asks_for_input_alone
from wnfused.ops._registration import (
    below_autograd,
    define,
    differentiable,
    is_exporting_or_tracing,
    is_transformed,
    no_view,
    through_reference,
)


def _fake(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float = 1.0, recompute: int = 0, save: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y = torch.empty_like(x, memory_format=reference.suggest_memory_format(x))
    norm = g.new_empty(g.shape, dtype=reference.wide(v.dtype))
    maps = reference.empty_stage_maps(x, v.shape[0], recompute, save)
    return y, norm, maps, _blank_signs(x, v.shape[0], recompute, save)


def _blank_signs(x: Tensor, blocks: int, recompute: int = 0, save: bool = True) -> Tensor:
    """Zeros, of the size that ``csrc/cuda/stage_tile.h`` gives them."""
    if not x.is_cuda or recompute or not save:
        return x.new_empty(0, dtype=torch.uint8)
    n, c, h, w = x.shape
    return x.new_zeros(blocks * n * ((h * w + 63) // 64) * 8 * c, dtype=torch.uint8)


def _write_signs(signs: Tensor, a: Tensor) -> None:
    """A block's, in the order of ``csrc/cuda/stage_tile.h``: a bit for each of the activations ``a [N, H, W, C]``, C a
    multiple of 16, that is not zero."""
    n, h, w, c = a.shape
    # A tile of 64 pixels is an image's own, but on the smallest maps that of the four images of a block of threads, and
    # kept in the place of the first; nobody reads the other three's.
    images = 4 if 4 * h * w <= 64 else 1
    groups, pixels = (n + images - 1) // images, images * h * w
    tiles = (pixels + 63) // 64
    pad = torch.nn.functional.pad
    bits = pad((a != 0).view(torch.uint8).flatten(1, 2), (0, 0, 0, 0, 0, groups * images - n))
    bits = pad(bits.reshape(groups, pixels, c), (0, 0, 0, 64 * tiles - pixels))
    bits = bits.reshape(groups, tiles, 4, 2, 8, c // 16, 2, 4, 2).permute(0, 1, 5, 4, 7, 2, 8, 6, 3)
    # Those of a byte are of neighbouring channels, of channels 8 apart and of pixels 8 apart.
    places = torch.arange(8, dtype=torch.uint8, device=a.device).reshape(2, 2, 2)
    signs.view(n, -1)[::images] = (bits << places).sum((6, 7, 8), dtype=torch.uint8).flatten(1)


def _with_signs(outputs: tuple[Tensor, ...], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """A backend's outputs as the op's. Most backends have no signs; they are written here where the native one could
    take the backward, which in a compiled graph does not follow its forward."""
    if len(outputs) == 4:
        return outputs
    x, v, _, _, *options = inputs
    signs = _blank_signs(x, v.shape[0], *options[1:])
    if signs.numel() and native_cuda.refusal("residual_stage", inputs) is None:
        for of_block, maps in zip(signs.view(v.shape[0], -1), outputs[2], strict=True):  # one at a time, to save memory
            _write_signs(of_block, maps[1])
    return (*outputs, signs)


def _fake_backward(
    dy: Tensor, v: Tensor, g: Tensor, bias: Tensor, norm: Tensor, maps: Tensor, skip_scale: float = 1.0,
    recompute: int = 0, parameters: bool = True, signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(dy, memory_format=reference.suggest_memory_format(dy))
    if not parameters:
        return dx, v.new_empty(0), g.new_empty(0), bias.new_empty(0)
    return dx, v.new_empty(v.shape), g.new_empty(g.shape), bias.new_empty(bias.shape)


_op = define(
    "residual_stage(Tensor x, Tensor v, Tensor g, Tensor bias, float skip_scale=1.0, int recompute=0, "
    "bool save=True) -> (Tensor y, Tensor norm, Tensor maps, Tensor signs)",
    _fake,
    laid_out=_with_signs,
    in_cpp=True,
)
_op_backward = define(
    "residual_stage_backward(Tensor dy, Tensor v, Tensor g, Tensor bias, Tensor norm, Tensor maps, "
    "float skip_scale=1.0, int recompute=0, bool parameters=True, Tensor? signs=None) "
    "-> (Tensor dx, Tensor dv, Tensor dg, Tensor dbias)",
    _fake_backward,
    in_cpp=True,
)


def _backward(
    dy: Tensor, inputs: Sequence[Any], outputs: Sequence[Any], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    _, v, g, bias, skip_scale, recompute, save = inputs
    if not save:
        raise RuntimeError("residual_stage: save=False kept nothing for a backward; call it with save=True")
    _, norm, maps, signs = outputs
    found = below_autograd(_op_backward, (dy, v, g, bias, norm, maps, skip_scale, recompute, any(needs[1:4]), signs))
    return [gradient if needed else None for gradient, needed in zip(found, needs[:4], strict=True)]


def _reference(*inputs: Any) -> tuple[Tensor, ...]:
    """Its signs are read by nobody: torch differentiates it."""
    x, v, _, _, *options = inputs
    return *reference.residual_stage(*inputs), _blank_signs(x, v.shape[0], *options[1:])


_call = differentiable(_op, reference=_reference, backward=_backward, transformed=_products.residual_stage)


def _kernel(x: Tensor) -> Any:
    return native_cuda.residual_stage if x.is_cuda else torch.ops.wnfused_native.residual_stage.default._op


def _kernel_backward(dy: Tensor, *others: Any) -> Any:
    """``others``: ``v, g, bias, norm, maps, signs``, the constants and whether parameters' gradients are asked for."""
    if dy.is_cuda:
        return native_cuda.residual_stage_backward(dy, *others)
    return torch.ops.wnfused_native.residual_stage_backward.default._op(dy, *others[:5], *others[6:])


class _Direct(torch.autograd.Function):
    """The fast path of ``wnfused.ops._direct``: the C++ kernel and no other, which checks its arguments itself.

    Of CPU tensors ``csrc/autograd`` has the same node, where it is at hand.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        y, *kept = _with_signs(_kernel(arguments[0])(*arguments, True), arguments)
        ctx.constants = arguments[4:]
        ctx.save_for_backward(*arguments[:4], *kept)
        return no_view(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return arguments.below_autocast(_gradients, ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> Any:
    x, v, g, bias, *kept = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled() or is_transformed(dy):
        return through_reference(reference.residual_stage, dy, (x, v, g, bias, *ctx.constants), needs)
    if asks_for_input_alone(ctx, needs):
        needs = (True, False, False, False)
    found = _kernel_backward(dy, v, g, bias, *kept, *ctx.constants, any(needs[1:4]))
    return *(gradient if needed else None for gradient, needed in zip(found, needs[:4], strict=True)), None, None


def _gradients_of_native_node(
    dy: Tensor, x: Tensor, v: Tensor, g: Tensor, bias: Tensor, needed: int, *constants: Any
) -> tuple[Tensor | None, ...]:
    """What a node in C++ calls back for: gradients with derivatives of their own, or of a batch."""
    return through_reference(reference.residual_stage, dy, (x, v, g, bias, *constants), flags_of(needed, 4))[:4]


_record_natively = native_autograd.layer("residual_stage", _gradients_of_native_node)
_Direct.__name__ = _Direct.__qualname__ = "residual_stage"
# torch.autograd.Function.apply itself: a look for functorch transforms, which is_open has seen to, and this.
_record = super(torch.autograd.Function, _Direct).apply


def residual_stage(
    x: Tensor,
    v: Tensor,
    g: Tensor,
    bias: Tensor,
    *,
    skip_scale: float = 1.0,
    recompute: int | None = None,
) -> Tensor:
    """All ``B`` identity blocks of a residual stage: ``h <- skip_scale (h + conv(relu(conv(h))))``, ``B`` times.

    Both convolutions are 3x3 with stride 1 and padding 1, weight-normalised by filter. The residual stream stays
    in float32 (float64 for float64) inside.

    Args:
        x: ``[N, C, H, W]``, or the same without N, which may be 0. channels_last is kept.
        v: directions ``[B, 2, C, C, 3, 3]``; the dtype of ``x``, or float32 with a half-precision ``x``.
        g, bias: gain and bias ``[B, 2, C]``.
        skip_scale: factor on each block's sum; 1 for a plain residual network.
        recompute: None keeps every block's two operand maps for the backward; k >= 1 keeps the input of every
            k-th block only and computes the rest again, at a third more time and 1 / (2 k) of the memory, plus
            one segment of k blocks.

    Returns:
        The shape of ``x``, in its dtype or autocast's.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: Arpit, Campos & Bengio 2019, eq. 6 (alpha absorbed in the gain), with one ReLU a block.
    """
    every = 0 if recompute is None else recompute
    fits = (
        type(skip_scale) is float
        and type(every) is int
        and -math.inf < skip_scale < math.inf
        and (every > 0 or recompute is None)
    )
    try:
        y = _direct(x, v, g, bias, skip_scale, every) if fits else None
    except (RuntimeError, TypeError):
        _checked(x, v, g, bias, skip_scale, recompute)
        raise
    return _general(x, v, g, bias, skip_scale, recompute) if y is None else y


def _direct(x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, every: int) -> Tensor | None:
    """None where the call may not take the fast path; RuntimeError where the kernel refuses its arguments."""
    y = by_entry("residual_stage", x, v, g, bias, skip_scale, every)
    if y is None and is_open_to_stages(x, v, g, bias) and bias is not None and x.dim() == 4:
        y = arguments.below_autocast(_run_direct, arguments.autocast(x), v, g, bias, skip_scale, every)
    return y


def _run_direct(x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, every: int) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or v.requires_grad or g.requires_grad or bias.requires_grad):
        native = x.is_cpu and native_autograd.unavailable() is None
        return (_record_natively if native else _record)(x, v, g, bias, skip_scale, every)
    y: Tensor = _kernel(x)(x, v, g, bias, skip_scale, every, False)[0]
    return y


def _general(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, recompute: int | None
) -> Tensor:  # fmt: skip
    tensors = (x, v, g, bias)
    if arguments.has_override(tensors):
        return handle_torch_function(residual_stage, tensors, x, v, g, bias, skip_scale=skip_scale, recompute=recompute)
    batch, v, g, bias = _checked(x, v, g, bias, skip_scale, recompute)
    as_product = recompute is None and batch.dtype == torch.float64 and runs_where_recorded(batch, v, g, bias, None)
    if as_product and dispatch.requested() is None:
        y = _products.residual_stage(batch, v, g, bias, float(skip_scale), 0, False)[0]
    else:
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (batch, v, g, bias))
        save = recorded and not is_exporting_or_tracing()
        y = _call(batch, v, g, bias, float(skip_scale), recompute or 0, save)[0]
    return y if x.dim() == y.dim() else y.squeeze(0)


@arguments.quiet_in_a_trace
def _checked(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, recompute: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The tensors; x in the dtype that it is computed in, with a batch."""
    arguments.floating("x", x)
    x = arguments.autocast(x)
    v, g, bias = arguments.beside_autocast(x, v, g, bias)
    if x.dim() not in (3, 4):
        raise ValueError(f"x: shape {list(x.shape)} is not [N, C, H, W], nor the same without N")
    x = x if x.dim() == 4 else x.unsqueeze(0)
    channels = x.shape[1]
    arguments.directions(v, x)
    if v.dim() != 6 or v.shape[1] != 2 or v.shape[2] != v.shape[3] or list(v.shape[4:]) != [3, 3]:
        raise ValueError(f"v: shape {list(v.shape)} is not [B, 2, C, C, 3, 3]; x has C = {channels}")
    if v.shape[2] != channels:
        raise ValueError(f"x: shape {list(x.shape)} has {channels} channels, v has {v.shape[2]}; use as many")
    if 0 in x.shape[1:]:
        raise ValueError(f"x: shape {list(x.shape)} has no pixel or no channel; only N may be 0")
    for name, parameter in (("g", g), ("bias", bias)):
        arguments.matches(name, parameter, x)
        if list(parameter.shape) != [v.shape[0], 2, channels]:
            raise ValueError(f"{name}: shape {list(parameter.shape)} does not fit; use {[v.shape[0], 2, channels]}")
    if not arguments.is_between("skip_scale", -sys.float_info.max, skip_scale):
        raise ValueError(f"skip_scale: {skip_scale} must be finite")
    if recompute is not None:
        positive(recompute=recompute)
    return x, v, g, bias
