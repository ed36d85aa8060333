"""The mathematics of every op, forward and backward, in plain torch. The oracle of every test.

A weight-normalised layer (Salimans & Kingma 2016; Arpit, Campos & Bengio 2019, eq. 1 and 2) computes

    y = act( s * op(x, v) + b + residual ),        s_i = g_i / ||v_i||,

where ``op`` is a matrix product or a convolution, ``v_i`` is row ``i`` of the direction tensor ``v`` (one filter
over ``c_in * k * k`` entries when ``dim = 0``), ``g_i`` its gain and ``||v_i||`` its row norm. With the effective
weight ``w_i = s_i v_i`` and ``dw`` the gradient with respect to it, the chain rule gives per row

    dg_i = <dw_i, v_i> / ||v_i||,        dv_i = s_i (dw_i - v_i <dw_i, v_i> / ||v_i||^2).

A row whose computed norm is 0 is a *zero row*: its weight and all its gradients, of both orders, are 0.

Every function here can be differentiated by autograd as often as you like; the explicit backward functions are the
formulas the kernels implement. Each op returns the row norms beside its result because the backward needs them.
Norms are taken in float32, or in float64 for float64 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wnfused._convolution import convolution, convolution_backward

ACTIVATIONS = ("none", "relu", "leaky_relu")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums are taken: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, and no op where it has that: one that does nothing goes through every level of a transform."""
    return t if t.dtype == dtype else t.to(dtype)


def suggest_memory_format(t: Tensor) -> torch.memory_format:
    """The memory format that an op keeps from ``t``: channels_last in two or three dims; all else is contiguous.

    Inside a transform of ``torch.func`` it is not asked for: a sample of ``vmap`` has none of its own.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    format = formats.get(t.dim(), torch.contiguous_format)
    if t.is_contiguous() or torch._C._are_functorch_transforms_active():
        return torch.contiguous_format
    kept = t.is_contiguous(memory_format=format)
    return format if kept else torch.contiguous_format


# ------------------------------------------------------------------------------------------------ weight norm


def _rows(v: Tensor, dim: int | None) -> tuple[list[int], list[int]]:
    """The dims that one row spans, and the shape that broadcasts one number a row against ``v``."""
    if dim is None:
        return list(range(v.dim())), [1] * v.dim()
    dim = dim % v.dim()
    return [d for d in range(v.dim()) if d != dim], [n if d == dim else 1 for d, n in enumerate(v.shape)]


def _row_sum(t: Tensor, spans: list[int]) -> Tensor:
    """The sum over a row, dims kept. Rows of a single entry span no dim, and torch would sum over all of them."""
    return t.sum(spans, keepdim=True) if spans else t


def _direction_and_norm(v: Tensor, dim: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """``(v, ||v||, zero)`` with zero rows replaced by ones *before* the norm is taken.

    Masking the result afterwards would leave 0 * inf = NaN in the gradients of ``sqrt`` at 0.
    """
    v = v.to(wide(v.dtype))
    spans, _ = _rows(v, dim)
    zero = _row_sum(v.detach().square(), spans) == 0
    v = torch.where(zero, torch.ones_like(v), v)
    return v, _row_sum(v.square(), spans).sqrt(), zero


def weight_norm(v: Tensor, g: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    """``w_i = g_i v_i / ||v_i||`` in the dtype of ``v``; and the row norms, ``[v.shape[dim]]`` (or ``[]``)."""
    direction, norm, zero = _direction_and_norm(v, dim)
    gain = g.to(direction.dtype).reshape(_rows(v, dim)[1])
    w = torch.where(zero, 0.0, direction * (gain / norm))
    norm = torch.where(zero, 0.0, norm)
    return w.to(v.dtype), norm.reshape([] if dim is None else [-1])


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int | None = 0) -> tuple[Tensor, Tensor]:
    """``dv_i = s_i (dw_i - v_i <dw_i, v_i> / ||v_i||^2)`` and ``dg_i = <dw_i, v_i> / ||v_i||``."""
    spans, broadcast = _rows(v, dim)
    zero = (norm == 0).reshape(broadcast)
    inverse = torch.where(zero, 0.0, 1 / torch.where(zero, 1.0, norm.reshape(broadcast)))
    unit = v.to(norm.dtype) * inverse
    dw = torch.where(zero, 0.0, dw.to(norm.dtype))  # a zero row has no gradient, be it NaN
    dgain = _row_sum(dw * unit, spans)
    scale = torch.where(zero, 0.0, g.to(norm.dtype).reshape(broadcast)) * inverse  # 0, be the gain infinite
    # All of a row of a single entry lies along v: what rounding would leave of it, Adam would take for a gradient.
    along = unit * dgain if dgain.numel() < dw.numel() else dw
    dv = scale * (dw - along)
    return dv.to(v.dtype), dgain.reshape(g.shape).to(g.dtype)


def weight_norm_many(
    v: Sequence[Tensor], g: Sequence[Tensor], dim: int | None = 0, weights: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """``weight_norm`` of each pair: the weights (none unless asked for), norms and scales ``s = g / ||v||``."""
    w, norm = (list(found) for found in zip(*map(weight_norm, v, g, [dim] * len(v)), strict=True)) if v else ([], [])
    return w if weights else [], norm, list(map(row_scale, g, norm))


def row_scale(g: Tensor, norm: Tensor) -> Tensor:
    """``s = g / ||v||`` in the dtype of the norms; 0 of a zero row."""
    return torch.where(norm == 0, 0.0, g.to(norm.dtype).reshape(norm.shape) / norm)


def weight_norm_many_backward(
    dw: Sequence[Tensor], v: Sequence[Tensor], g: Sequence[Tensor], norm: Sequence[Tensor], dim: int | None = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """``weight_norm_backward`` of each."""
    found = [weight_norm_backward(*tensors, dim) for tensors in zip(dw, v, g, norm, strict=True)]
    return [dv for dv, _ in found], [dg for _, dg in found]


def _effective_weight(v: Tensor, g: Tensor, dim: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``w`` computed in the wider of the parameters' and the operands' dtypes, rounded once to the operands'."""
    w, norm = weight_norm(v.to(wide(v.dtype)), g, dim)
    return w.to(dtype), norm


# ------------------------------------------------------------------------------------------------- activation


def activate(z: Tensor, activation: str, negative_slope: float) -> Tensor:
    """``z``, ``max(z, 0)`` or ``max(z, 0) + negative_slope * min(z, 0)``."""
    if activation == "relu":
        return torch.relu(z)
    if activation == "leaky_relu":
        return torch.nn.functional.leaky_relu(z, negative_slope)
    return z


def activate_backward(dy: Tensor, y: Tensor, activation: str, negative_slope: float) -> Tensor:
    """The gradient before the activation, its mask read off the output: with a slope >= 0, y <= 0 iff z <= 0.

    NaN passes a ReLU and counts as negative in a leaky one, as in torch; a slope of 0 makes a ReLU here.
    """
    if activation == "none":
        return dy
    slope = 0.0 if activation == "relu" else negative_slope
    return torch.where(y > 0, dy, dy * slope) if slope else torch.where(y <= 0, 0.0, dy)


def _finished(y: Tensor, residual: Tensor | None, activation: str, negative_slope: float) -> Tensor:
    return activate(y if residual is None else y + residual, activation, negative_slope)


# ----------------------------------------------------------------------------------------------------- linear


def linear(
    x: Tensor,
    v: Tensor,
    g: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dim: int | None = 0,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """``act(x w^T + b + residual)`` for ``x [..., in]``, ``v [out, in]``; and the row norms."""
    w, norm = _effective_weight(v, g, dim, x.dtype)
    return linear_of_weight(x, w, bias, residual, activation, negative_slope), norm


def linear_of_weight(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, negative_slope: float
) -> Tensor:
    """``act(x w^T + b + residual)``, with ``w`` in the dtype of ``x``."""
    y = torch.nn.functional.linear(x, w, None if bias is None else cast(bias, x.dtype))
    return _finished(y, residual, activation, negative_slope)


def linear_backward(
    dy: Tensor,
    y: Tensor,
    x: Tensor,
    v: Tensor,
    g: Tensor,
    norm: Tensor,
    needs: list[bool],
    dim: int | None = 0,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dx, dv, dg, db, dz)``; an output that ``needs = [x, v or g, bias, residual]`` rules out is empty.

    ``dz = act'(z) dy`` is the gradient of the residual; ``dx = dz w``, ``dw = dz^T x``, ``db = sum dz``. ``y`` is
    read only for its signs, and not at all without an activation, where ``dz`` is ``dy`` itself.
    """
    dz = activate_backward(dy, y, activation, negative_slope)
    rows = dz.reshape(dz.shape[:-1].numel(), dz.shape[-1])  # -1 would be ambiguous where a dim is 0
    dx, dv, dg, db = (dy.new_empty(0) for _ in range(4))
    if needs[0]:
        dx = dz @ _effective_weight(v, g, dim, x.dtype)[0]
    if needs[1]:
        dv, dg = weight_norm_backward(rows.T @ x.reshape(rows.shape[0], x.shape[-1]), v, g, norm, dim)
    if needs[2]:
        db = rows.sum(0, dtype=wide(dy.dtype)).to(v.dtype)
    return dx, dv, dg, db, dz if needs[3] and dz is not dy else dy.new_empty(0)


# ------------------------------------------------------------------------------------------------ convolution


def conv(
    x: Tensor,
    v: Tensor,
    g: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    dim: int | None = 0,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """``act(conv(x, w) + b + residual)`` in one, two or three spatial dims; and the row norms.

    ``x [N, C_in, *spatial]``; ``v [C_out, C_in / groups, *kernel]``, transposed ``[C_in, C_out / groups, *kernel]``.
    """
    w, norm = _effective_weight(v, g, dim, x.dtype)
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    return conv_of_weight(x, w, bias, residual, *geometry, activation, negative_slope), norm


def conv_of_weight(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, activation: str,
    negative_slope: float,
) -> Tensor:  # fmt: skip
    """``act(conv(x, w) + b + residual)``, with ``w`` in the dtype of ``x``."""
    b = None if bias is None else cast(bias, x.dtype)
    y = convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups)
    return _finished(y, residual, activation, negative_slope)


def conv_backward(
    dy: Tensor,
    y: Tensor,
    x: Tensor,
    v: Tensor,
    g: Tensor,
    norm: Tensor,
    needs: list[bool],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    dim: int | None = 0,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dx, dv, dg, db, dz)`` as ``linear_backward`` gives them."""
    dz = activate_backward(dy, y, activation, negative_slope)
    dx, dv, dg, db = (dy.new_empty(0) for _ in range(4))
    if needs[0] or needs[1]:
        w, _ = _effective_weight(v, g, dim, x.dtype)
        w = w.contiguous() if transposed and groups > 1 else w
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        found_dx, dw, _ = convolution_backward(dz, x, w, None, *geometry, [needs[0], needs[1], False])
        if needs[0]:
            dx = found_dx
        if needs[1]:
            dv, dg = weight_norm_backward(dw, v, g, norm, dim)
    if needs[2]:
        db = dz.sum([0, *range(2, dz.dim())], dtype=wide(dy.dtype)).to(v.dtype)
    return dx, dv, dg, db, dz if needs[3] and dz is not dy else dy.new_empty(0)


# --------------------------------------------------------------------------------------------- residual stage


def _block(
    h: Tensor, v: Tensor, g: Tensor, bias: Tensor, skip_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """One identity block: ``(h', operand, a)`` with ``a = relu(conv(h, w_1) + b_1)`` and
    ``h' = skip_scale (h + conv(a, w_2) + b_2)``. Operands are rounded to ``dtype``, sums kept wide."""
    w = [weight_norm(v[i].to(h.dtype), g[i])[0].to(dtype).to(h.dtype) for i in (0, 1)]
    return block_of_weights(h, w, bias, skip_scale, dtype)


def block_of_weights(
    h: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor] | Tensor, skip_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of both weights, wide, and both biases."""

    def conv3x3(operand: Tensor, i: int) -> Tensor:
        return torch.nn.functional.conv2d(cast(operand, h.dtype), w[i], cast(bias[i], h.dtype), padding=1)

    operand = cast(h, dtype)
    a = cast(torch.relu(conv3x3(operand, 0)), dtype)
    after = h + conv3x3(a, 1)
    return after if skip_scale == 1 else skip_scale * after, operand, a


def residual_stage(
    x: Tensor,
    v: Tensor,
    g: Tensor,
    bias: Tensor,
    skip_scale: float = 1.0,
    recompute: int = 0,
    save: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``B`` identity blocks ``h <- skip_scale (h + conv(relu(conv(h))))`` one after the other: ``(y, norm, maps)``.

    ``x [N, C, H, W]``, ``v [B, 2, C, C, 3, 3]``, ``g, bias [B, 2, C]``; ``norm [B, 2, C]``. The residual stream is
    kept wide whatever the operands' dtype; ``y`` has the dtype of ``x``.

    ``maps`` is what the backward needs, NHWC: with ``recompute = 0`` both operands of every block,
    ``[B, 2, N, H, W, C]`` in the dtype of ``x``; with ``recompute = k > 0`` the wide input of blocks 0, k, 2k, ...,
    ``[ceil(B / k), 1, N, H, W, C]``; empty unless ``save``.
    """
    h = x.to(wide(x.dtype))
    kept: list[Tensor] = []
    for b in range(v.shape[0]):
        before = h
        h, operand, a = _block(h, v[b], g[b], bias[b], skip_scale, x.dtype)
        if save and recompute == 0:
            kept.append(torch.stack([operand, a]))
        elif save and b % recompute == 0:
            kept.append(before.unsqueeze(0))
    norm = weight_norm(v.flatten(0, 2), g.flatten())[1].reshape(g.shape)
    # Not written into an empty tensor: under vmap over the parameters these maps are batched, such a tensor is not.
    maps = torch.stack(kept).permute(0, 1, 2, 4, 5, 3).contiguous() if kept else empty_stage_maps(x, 0, recompute, save)
    y = h.to(x.dtype)
    return (y.clone() if y is x else y), norm, maps


def empty_stage_maps(x: Tensor, blocks: int, recompute: int, save: bool) -> Tensor:
    """Unwritten maps in the layout that ``residual_stage`` documents, the same for every backend."""
    dtype = wide(x.dtype) if recompute else x.dtype
    if not save:
        return x.new_empty(0, dtype=dtype)
    n, c, h, w = x.shape
    parts = (-(-blocks // recompute), 1) if recompute else (blocks, 2)
    return x.new_empty([*parts, n, h, w, c], dtype=dtype)


def residual_stage_backward(
    dy: Tensor,
    v: Tensor,
    g: Tensor,
    bias: Tensor,
    norm: Tensor,
    maps: Tensor,
    skip_scale: float = 1.0,
    recompute: int = 0,
    parameters: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(dx, dv, dg, dbias)``, from the last block to the first; the last three are empty unless ``parameters``.

    With ``dh'`` the gradient after a block, ``dF = skip_scale dh'`` enters the second convolution and
    ``dh = dF + conv_1^T( relu'(a) conv_2^T(dF) )``.
    """
    dtype, blocks = dy.dtype, v.shape[0]
    maps = maps.permute(0, 1, 2, 5, 3, 4)
    dh = dy.to(wide(dtype))
    dv, dg, dbias = (t.new_zeros(t.shape) for t in (v, g, bias))
    operands: dict[int, tuple[Tensor, Tensor]] = {}

    def conv_backward_3x3(dz: Tensor, operand: Tensor, b: int, i: int) -> Tensor:
        w = weight_norm(v[b, i].to(dh.dtype), g[b, i])[0].to(dtype).to(dh.dtype)
        dz = dz.to(dtype).to(dh.dtype)
        dx, dw, db = torch.ops.aten.convolution_backward(
            dz, operand.to(dh.dtype), w, [w.shape[0]], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
            [True, parameters, parameters],
        )  # fmt: skip
        if parameters:
            dv[b, i], dg[b, i] = weight_norm_backward(dw, v[b, i], g[b, i], norm[b, i])
            dbias[b, i] = db
        return dx

    for b in reversed(range(blocks)):
        if recompute == 0:
            operand, a = maps[b]
        else:
            if b not in operands:
                operands.clear()
                h = maps[b // recompute, 0]
                for later in range(b - b % recompute, b + 1):
                    h, operand, a = _block(h, v[later], g[later], bias[later], skip_scale, dtype)
                    operands[later] = operand, a
            operand, a = operands[b]
        dF = skip_scale * dh
        da = torch.where(a <= 0, 0.0, conv_backward_3x3(dF, a, b, 1))
        dh = dF + conv_backward_3x3(da, operand, b, 0)
    dx = dh.to(dtype)
    if not parameters:
        dv, dg, dbias = (t.new_empty(0) for t in (v, g, bias))
    return (dx.clone() if dx is dy else dx), dv, dg, dbias
