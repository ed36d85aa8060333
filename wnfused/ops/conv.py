"""``conv1d/2d/3d`` and their transposes: row norm, gain, convolution, bias, residual and activation as one op."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from wnfused import reference
from wnfused._numbers import plain_int
from wnfused._spatial import Extent, checked_padding, extents, padded_behind, text_in_dims, zeros_around
from wnfused.ops import _arguments as arguments
from wnfused.ops import _products
from wnfused.ops._direct import CODES, FIRST_DIM, layer
from wnfused.ops._registration import define, differentiable
from wnfused.ops.linear import GRADIENTS_LIKE, fake_layer_gradients, layer_backward

_GEOMETRY = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)


def _in_suggested_format(outputs: tuple[Tensor, Tensor], inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """``y`` in channels_last (over three dims channels_last_3d) where ``x`` or ``v`` is that alone, else contiguous.

    torch goes by strides, which say channels_last of some maps of one channel, too. A compiled graph may give those
    any: the format must follow from what it does not change.
    """
    y, norm = outputs
    formats = {reference.suggest_memory_format(t) for t in inputs[:2]} - {torch.contiguous_format}
    return y.contiguous(memory_format=formats.pop() if formats else torch.contiguous_format), norm


def _fake(
    x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, residual: Tensor | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = torch.convolution(x, v.to(x.dtype), None, stride, padding, dilation, transposed, output_padding, groups)
    norm = v.new_empty([] if dim is None else [v.shape[dim]], dtype=reference.wide(v.dtype))
    return _in_suggested_format((y, norm), (x, v))


def _fake_backward(
    dy: Tensor, y: Tensor, x: Tensor, v: Tensor, g: Tensor, norm: Tensor, needs: list[bool], stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    dim: int | None = 0, activation: str = "none", negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    features = v.shape[1] * groups if transposed else v.shape[0]
    return fake_layer_gradients(dy, x, v, g, features, needs, activation)


_op = define(
    f"conv(Tensor x, Tensor v, Tensor g, Tensor? bias, Tensor? residual, {_GEOMETRY}, int? dim=0, "
    "str activation='none', float negative_slope=0.01) -> (Tensor y, Tensor norm)",
    _fake,
    laid_out=_in_suggested_format,
    in_cpp=True,
)
_op_backward = define(
    "conv_backward(Tensor dy, Tensor y, Tensor x, Tensor v, Tensor g, Tensor norm, bool[] needs, "
    f"{_GEOMETRY}, int? dim=0, str activation='none', float negative_slope=0.01) "
    "-> (Tensor dx, Tensor dv, Tensor dg, Tensor dbias, Tensor dz)",
    _fake_backward,
    like=GRADIENTS_LIKE,
    in_cpp=True,
)


def _backward(
    dy: Tensor, inputs: Sequence[Any], outputs: Sequence[Any], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    return layer_backward(_op_backward, dy, inputs, outputs, needs)


_call = differentiable(
    _op,
    reference=reference.conv,
    backward=_backward,
    reads_output=lambda inputs: inputs[-2] != "none",
    transformed=_products.conv,
)


def _direct_reference(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, v, g, bias, residual, stride, padding, dilation, groups, code, slope = inputs
    geometry = (stride, padding, dilation, False, [0] * len(stride), groups)
    return reference.conv(x, v, g, bias, residual, *geometry, 0, reference.ACTIVATIONS[code], slope)


_direct = layer("conv", _direct_reference)


_INT = (int, torch.SymInt)


def _direct_transposed_reference(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, v, g, bias, residual, stride, padding, dilation, output_padding, groups, code, slope = inputs
    geometry = (stride, padding, dilation, True, output_padding, groups)
    return reference.conv(x, v, g, bias, residual, *geometry, 0, reference.ACTIVATIONS[code], slope)


_kernels = torch.ops.wnfused_native
_direct_transposed = layer(
    "conv_transpose",
    _direct_transposed_reference,
    (_kernels.conv_transpose.default._op, _kernels.conv_transpose_backward.default._op),
)


@arguments.quiet_in_a_trace
def _checked(
    spatial: int, transposed: bool, x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None, stride: Extent,
    padding: Extent | str, dilation: Extent, output_padding: Extent, groups: int, activation: str | None,
    negative_slope: float, residual: Tensor | None, dim: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The op's arguments, ``x`` and the residual with a batch."""
    arguments.floating("x", x)
    x = arguments.autocast(x)
    v, g, bias = arguments.beside_autocast(x, v, g, bias)
    arguments.directions(v, x)
    if v.dim() != spatial + 2:
        raise ValueError(f"v: shape {list(v.shape)} must have {spatial + 2} dims")
    if 0 in v.shape:
        raise ValueError(f"v: shape {list(v.shape)} has no entry; channels and kernel must be at least 1 each")
    groups = plain_int(groups)
    if isinstance(groups, bool) or not isinstance(groups, _INT) or groups < 1 or v.shape[0] % groups:
        raise ValueError(f"groups: {groups!r} must be at least 1 and divide v.shape[0] = {v.shape[0]}")
    channels = v.shape[0] if transposed else v.shape[1] * groups
    features = v.shape[1] * groups if transposed else v.shape[0]
    arguments.maps(x, channels, spatial)
    batched = x.dim() == spatial + 2
    # In any other layout kernels make a copy, and torch would choose the format of y by it.
    v = v.contiguous(memory_format=reference.suggest_memory_format(v))
    arguments.matches("g", g, x)
    arguments.gain(g, v, dim)
    arguments.bias(bias, features, x)
    strides = list(extents("stride", stride, spatial, 1))
    dilations = list(extents("dilation", dilation, spatial, 1))
    extra = list(extents("output_padding", output_padding, spatial, 0))
    if any(extra) and any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ValueError(f"output_padding: {extra} must be below stride {strides} or dilation {dilations}, dim by dim")
    if not batched:
        x = x.unsqueeze(0)
        if residual is not None:
            arguments.floating("residual", residual)
            residual = residual.unsqueeze(0)
    x, zeros = _padded(x, v, checked_padding(padding, spatial, strides, transposed), dilations)
    sizes = _output_sizes(x, v, strides, zeros, dilations, transposed, extra)
    if any(_is_below_1(size) for size in sizes) and not (transposed and x.shape[0] == 0 and min(sizes) == 0):
        window = f"a kernel of {list(v.shape[2:])} with padding {zeros} and dilation {dilations}"
        if transposed:
            raise ValueError(f"x: spatial size {list(x.shape[2:])} gives an output of {sizes} by {window}")
        raise ValueError(f"x: spatial size {list(x.shape[2:])} is too small for {window}")
    if any(_is_below_1(size) for size in x.shape[2:]) and x.shape[0] != 0:
        raise ValueError(f"x: spatial size {list(x.shape[2:])} must be at least 1 in every dim, padding aside")
    if residual is not None:
        residual = arguments.residual(residual, [x.shape[0], features, *sizes], x)
    name = arguments.activation(activation, negative_slope)
    geometry = (strides, zeros, dilations, transposed, extra, groups)
    return x, v, g, bias, residual, *geometry, dim, name, float(negative_slope)


def _run(x: Tensor, given: tuple[Any, ...]) -> Tensor:
    y = _call(*given)[0]
    return y if x.dim() == y.dim() else y.squeeze(0)


def _output_sizes(
    x: Tensor, v: Tensor, strides: list[int], paddings: list[int], dilations: list[int], transposed: bool,
    extra: list[int],
) -> list[int]:  # fmt: skip
    """The spatial sizes of the output."""
    geometry = zip(x.shape[2:], v.shape[2:], strides, paddings, dilations, extra, strict=True)
    if transposed:
        return [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in geometry]
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in geometry]


def _is_below_1(size: Any) -> bool:
    """Of a size that an export knows nothing of, as it depends on data: no."""
    if not isinstance(size, torch.SymInt):
        return bool(size < 1)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size < 1)


def _kernel(v: Tensor) -> list[int]:
    """Its extents, which ``torch.jit.trace`` gives as tensors: those of a weight are constants."""
    return [int(k) if isinstance(k, Tensor) else k for k in v.shape[2:]]


def _padded(x: Tensor, v: Tensor, padding: tuple[int, ...] | str, dilations: list[int]) -> tuple[Tensor, list[int]]:
    """``x`` and how many zeros go around it."""
    if not isinstance(padding, str):
        return x, list(padding)
    around, behind = zeros_around(padding, _kernel(v), dilations)
    return padded_behind(x, behind), around


def _in_numbers(padding: str, v: Tensor, stride: Extent, dilation: Extent) -> tuple[int, ...] | str:
    """A named padding of a layer's own attributes that is the same on both sides; any other by its name.

    In a trace, where sizes may be symbols or tensors, by its name, too: the fast path that reads numbers is not taken.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return padding
    if type(v) not in arguments.PLAIN or type(stride) is not tuple or type(dilation) is not tuple:
        return padding
    try:
        return _even(padding, v.shape[2:], stride, dilation)
    except TypeError:  # a list, say, cannot be looked up; the check names it
        return padding


@functools.lru_cache(256)
def _even(
    padding: str, kernel: tuple[int, ...], stride: tuple[Any, ...], dilation: tuple[Any, ...]
) -> tuple[int, ...] | str:
    if padding not in ("same", "valid") or not len(stride) == len(dilation) == len(kernel):
        return padding
    if not all(type(n) is int for n in (*stride, *dilation)):
        return padding
    if padding == "same" and any(step != 1 for step in stride):
        return padding
    around, behind = zeros_around(padding, kernel, dilation)
    return padding if any(behind) else tuple(around)


def conv(
    spatial: int, x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, stride: Extent = 1,
    padding: Extent | str = 0, dilation: Extent = 1, groups: int = 1, *, activation: str | None = None,
    negative_slope: float = 0.01, residual: Tensor | None = None, dim: int | None = 0,
) -> Tensor:  # fmt: skip
    """``y = act(conv2d(x, w) + bias + residual)`` with ``w_i = g_i v_i / ||v_i||_2``, one row a filter.

    Args:
        x: ``[N, C_in, H, W]`` or ``[C_in, H, W]``; N may be 0. channels_last (_3d) is kept.
        v: directions ``[C_out, C_in / groups, k_h, k_w]``; the dtype of ``x``, or float32 with a half-precision ``x``.
        g: gain of each filter, ``[C_out, 1, 1, 1]`` or ``[C_out]`` (``dim=0``).
        bias: ``[C_out]`` or None.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``, in entries of ``x``.
        activation: None, ``"relu"`` or ``"leaky_relu"`` with ``negative_slope`` >= 0.
        residual: added before the activation; the shape of ``y``.
        dim: the dim of ``v`` that numbers the normalised rows; None for one norm over ``v``.

    Returns:
        ``[N, C_out, H', W']`` in the dtype of ``x``, or autocast's.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: Arpit, Campos & Bengio 2019, eq. 1 and 2, footnote 3.
    """
    if type(padding) is str:
        padding = _in_numbers(padding, v, stride, dilation)
    rest = (padding, dilation, 0, groups, activation, negative_slope, residual, dim)
    try:
        code = CODES.get(activation)
    except TypeError:  # a list, say; the check names it
        code = None
    window: tuple[Any, ...] = (stride, padding, dilation)
    if not type(stride) is type(padding) is type(dilation) is tuple:
        window = _in_tuples((stride, padding, dilation), spatial)
    in_order = code is not None and bool(window) and dim is FIRST_DIM and type(groups) is int
    if in_order and _have_dims(x, v, spatial + 2):
        try:
            y = _direct(x, v, g, bias, residual, *window, groups, code, negative_slope)
        except (RuntimeError, TypeError):
            given = _checked(spatial, False, x, v, g, bias, stride, *rest)
            if _in_other_words(given, *window, groups):
                return _run(x, given)
            raise
        if y is not None:
            return y
    tensors = (x, v, g, bias, residual)
    if arguments.has_override(tensors):
        named = (x, v, g, bias, stride, padding, dilation, groups)
        return _handed_over("conv", spatial, tensors, named, activation, negative_slope, residual, dim)
    return _run(x, _checked(spatial, False, x, v, g, bias, stride, *rest))


def _in_tuples(window: tuple[Any, ...], spatial: int) -> tuple[Any, ...]:
    """Extents as a layer has them, of ints, tuples and lists of ints; nothing where there is anything else, which the
    checks read, or name."""
    found = []
    for extent in window:
        if type(extent) is int:
            found.append((extent,) * spatial)
        elif type(extent) in (tuple, list) and all(type(n) is int for n in extent):
            found.append(tuple(extent))
        else:
            return ()
    return tuple(found)


def _have_dims(x: Any, v: Any, dims: int) -> bool:
    return isinstance(x, Tensor) and isinstance(v, Tensor) and x.dim() == v.dim() == dims


def conv_transpose(
    spatial: int, x: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, stride: Extent = 1, padding: Extent = 0,
    output_padding: Extent = 0, groups: int = 1, dilation: Extent = 1, *, activation: str | None = None,
    negative_slope: float = 0.01, residual: Tensor | None = None, dim: int | None = 0,
) -> Tensor:  # fmt: skip
    """``y = act(conv_transpose2d(x, w) + bias + residual)``; rows are numbered by *input* channels for ``dim=0``.

    Args:
        x: ``[N, C_in, H, W]`` or ``[C_in, H, W]``.
        v: directions ``[C_in, C_out / groups, k_h, k_w]``; dtypes as in ``conv2d``.
        g: gain of each row, ``[C_in, 1, 1, 1]`` or ``[C_in]`` (``dim=0``), as torch's weight norm has it.
        bias: ``[C_out]`` or None.
        stride, padding, output_padding, groups, dilation: as in ``torch.nn.functional.conv_transpose2d``, in its order.
        activation, negative_slope, residual, dim: as in ``conv2d``.

    Returns:
        ``[N, C_out, H', W']`` in the dtype of ``x``, or autocast's.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: Salimans & Kingma 2016, eq. 2, by rows as in ``torch.nn.utils.parametrizations.weight_norm``.
    """
    rest = (padding, dilation, output_padding, groups, activation, negative_slope, residual, dim)
    try:
        code = CODES.get(activation)
        slope_fits = 0 <= negative_slope < math.inf
    except (TypeError, ValueError, RuntimeError):  # a list, say; the check names it
        code = None
    window: tuple[Any, ...] = (stride, padding, dilation, output_padding)
    if not type(stride) is type(padding) is type(dilation) is type(output_padding) is tuple:
        window = _in_tuples((stride, padding, dilation, output_padding), spatial)
    in_order = code is not None and slope_fits and bool(window) and dim is FIRST_DIM and type(groups) is int
    if in_order and _have_dims(x, v, spatial + 2):
        try:
            y = _direct_transposed(x, v, g, bias, residual, *window, groups, code, negative_slope)
        except (RuntimeError, TypeError):
            given = _checked(spatial, True, x, v, g, bias, stride, *rest)
            if _in_other_words(given, *window, groups):
                return _run(x, given)
            raise
        if y is not None:
            return y
    tensors = (x, v, g, bias, residual)
    if arguments.has_override(tensors):
        named = (x, v, g, bias, stride, padding, output_padding, groups, dilation)
        return _handed_over("conv_transpose", spatial, tensors, named, activation, negative_slope, residual, dim)
    return _run(x, _checked(spatial, True, x, v, g, bias, stride, *rest))


def _in_other_words(given: tuple[Any, ...], *geometry: Any) -> bool:
    """Whether the checked arguments are others than the kernel was given: ``(1,)`` for all dims, ints of numpy's."""
    strides, paddings, dilations, transposed, extra, groups = given[5:11]
    checked = (strides, paddings, dilations, *([extra] if transposed else []), [groups])
    named = (*geometry[:-1], geometry[-1:])
    return any(
        [(type(n), n) for n in extents] != [(int, n) for n in right]
        for extents, right in zip(named, checked, strict=True)
    )


def _handed_over(
    name: str, spatial: int, tensors: tuple[Any, ...], given: tuple[Any, ...], activation: str | None,
    negative_slope: float, residual: Tensor | None, dim: int | None,
) -> Any:  # fmt: skip
    """The call as the tensors that answer for themselves make it, under the public function's name."""
    options = {"activation": activation, "negative_slope": negative_slope, "residual": residual, "dim": dim}
    return handle_torch_function(_FUNCTIONS[f"{name}{spatial}d"], tensors, *given, **options)


P = ParamSpec("P")


def _in_dims(spatial: int, name: str, function: Callable[Concatenate[int, P], Tensor]) -> Callable[P, Tensor]:
    """The public function for a number of spatial dims, with the signature and the text of all."""

    def convolution(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return function(spatial, *args, **kwargs)

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    convolution.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    convolution.__name__ = convolution.__qualname__ = f"{name}{spatial}d"
    convolution.__doc__ = None if function.__doc__ is None else text_in_dims(spatial, function.__doc__)
    return convolution


conv1d = _in_dims(1, "conv", conv)
conv2d = _in_dims(2, "conv", conv)
conv3d = _in_dims(3, "conv", conv)
conv_transpose1d = _in_dims(1, "conv_transpose", conv_transpose)
conv_transpose2d = _in_dims(2, "conv_transpose", conv_transpose)
conv_transpose3d = _in_dims(3, "conv_transpose", conv_transpose)
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d)
}
