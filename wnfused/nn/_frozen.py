"""What layers run in their place inside ``wnfused.frozen``: each takes the input and the residual."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wnfused._convolution import reads_behind_rows, vendor_is_wrong
from wnfused._spatial import padded_behind, zeros_around
from wnfused.ops import _arguments as arguments
from wnfused.ops._direct import CODES
from wnfused.ops.kept import kept_conv, kept_kernel


class Plain(nn.Module):
    """A plain torch layer, and what the weight-normalised one does after its product."""

    def __init__(self, plain: nn.Module, activation: str | None, negative_slope: float) -> None:
        super().__init__()
        self.plain, self.activation, self.negative_slope = plain, activation, negative_slope
        if isinstance(plain, _ConvNd):
            self.may_be_misled = plain.weight.dtype != torch.float32 or max(*plain.stride, *plain.dilation) > 1
        else:
            self.may_be_misled = plain.weight.dtype == torch.bfloat16

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        # In float32 dense windows are right.
        asked = self.may_be_misled or torch._C._is_any_autocast_enabled()
        y: Tensor = (self._product if asked else self.plain.forward)(input)  # it has no hooks
        if residual is not None:
            y = y + arguments.residual(residual, list(y.shape), y)
        if self.activation == "relu":
            return nn.functional.relu(y)
        if self.activation == "leaky_relu":
            return nn.functional.leaky_relu(y, self.negative_slope)
        return y

    def _product(self, input: Tensor) -> Tensor:
        """The plain layer's, in float64 where torch's own would be wrong; linear layers in float32."""
        plain, dtype = self.plain, arguments.autocast(input).dtype
        if isinstance(plain, nn.Linear) and reads_behind_rows(input, dtype):
            with torch.autocast(input.device.type, enabled=False):
                bias = None if plain.bias is None else plain.bias.float()
                return nn.functional.linear(input.float(), plain.weight.float(), bias).to(dtype)
        if not isinstance(plain, _ConvNd) or not _vendor_is_wrong(plain, input):
            y: Tensor = plain.forward(input)
            return y
        with torch.autocast(input.device.type, enabled=False):
            wide: Tensor = copy.deepcopy(plain).double().forward(input.double())
        return wide.to(dtype)


def _vendor_is_wrong(conv: _ConvNd, x: Tensor) -> bool:
    """Whether torch gets a plain layer's forward wrong."""
    dtype = arguments.autocast(x).dtype
    if x.dim() == conv.weight.dim() - 1:
        x = x[None]
    padding: Any = conv.padding
    if conv.padding_mode != "zeros":
        x, padding = nn.functional.pad(x, conv._reversed_padding_repeated_twice), (0,) * len(conv.kernel_size)
    elif isinstance(padding, str):
        padding, behind = zeros_around(padding, conv.kernel_size, conv.dilation)
        x = padded_behind(x, behind)
    geometry = (conv.stride, padding, conv.dilation, conv.transposed, conv.output_padding, conv.groups)
    return vendor_is_wrong(x, conv.weight, *geometry, dtype)


class ByPixels(nn.Module):
    """``few`` on inputs of up to so many entries, ``many`` on larger ones."""

    def __init__(self, few: nn.Module, many: nn.Module, entries: int) -> None:
        super().__init__()
        self.few, self.many, self.entries = few, many, entries

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        # A compiled function serves inputs of every size.
        few = not torch.compiler.is_compiling() and input.numel() <= self.entries
        y: Tensor = (self.few if few else self.many).forward(input, residual=residual)
        return y


class Kept(nn.Module):
    """A copy of a convolution, and its weights as the C++ kernels packed them, where they are worth keeping.

    Args:
        layer: the copy; its parameters are nobody else's, and record no gradient.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        transposed = isinstance(layer, _ConvTransposeNd)
        extra = (layer.output_padding,) if transposed else ()
        self.layer = layer
        self.weights = layer._v_g_bias()
        self.banks: list[Tensor] = []  # one for each way of multiplying that inputs asked for
        self.op = "kept_conv_transpose" if transposed else "kept_conv"
        self.kernel = kept_kernel(self.op)
        self.constants = (
            layer.stride, layer.padding, layer.dilation, *extra, layer.groups, CODES[layer.activation],
            layer.negative_slope,
        )  # fmt: skip

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        y = kept_conv(self.op, self.kernel, input, self.weights, residual, self.banks, self.constants)
        if y is not None:
            return y
        # A transposed layer's second argument is another one.
        output: Tensor = self.layer.forward(input, residual=residual)
        return output
