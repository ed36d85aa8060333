"""Lazy layers: the first input says how many channels there are; then they become the layers they are named after."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from wnfused._numbers import truth
from wnfused.nn._geometry import divide, sizes
from wnfused.nn._layer import WeightNormalised
from wnfused.nn.conv import WNConv1d, WNConv2d, WNConv3d
from wnfused.nn.conv_transpose import WNConvTranspose1d, WNConvTranspose2d, WNConvTranspose3d
from wnfused.nn.linear import WNLinear
from wnfused.ops._arguments import floating

# torch types an uninitialised parameter as a tensor; it is registered as the parameter that it will be.
_Later = cast(type[nn.Parameter], UninitializedParameter)


class _Lazy(LazyModuleMixin, WeightNormalised):
    """Mixin before the layer to become; its constructor takes that layer's arguments but the first."""

    cls_to_become: type[WeightNormalised]
    _inputs, _outputs = "in_channels", "out_channels"
    _takes: inspect.Signature
    __signature__: inspect.Signature | None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if _Lazy in cls.__bases__:
            cls.cls_to_become = cls.__bases__[-1]
            signature = inspect.signature(cls.cls_to_become)
            cls._takes = signature.replace(parameters=list(signature.parameters.values())[1:])
        # A subclass with a constructor of its own has that one's.
        cls.__signature__ = cls._takes if cls.__init__ is _Lazy.__init__ else None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        given = self._takes.bind(*arguments, **keywords)
        given.apply_defaults()
        options = dict(given.arguments)
        outputs, bias = options.pop(self._outputs), options.pop("bias")
        truth(bias=bias)
        outputs = sizes(**{self._outputs: outputs})[self._outputs]
        where = {"device": options["device"], "dtype": options["dtype"]}
        # Without features and bias nothing is allocated that would be thrown away.
        super().__init__(**{self._inputs: 0, self._outputs: 0}, bias=False, **options)
        setattr(self, self._outputs, outputs)
        self.register_parameter("bias", _Later(**where) if bias else None)
        self.register_parameter("weight_g", _Later(**where))
        self.register_parameter("weight_v", _Later(**where))

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params() and getattr(self, self._inputs):
            super().reset_parameters()

    def initialize_parameters(self, input: Tensor, *_: Any, **__: Any) -> None:
        """Before the first forward: shapes from ``input``, then ``reset_parameters`` unless loaded before."""
        channel = self._channel_of(input)
        setattr(self, self._inputs, input.shape[channel])
        if self.has_uninitialized_params():
            with torch.no_grad():
                shape = self._weight_shape(input.shape[channel], getattr(self, self._outputs))
                self.weight_v.materialize(shape)  # type: ignore[attr-defined]
                self.weight_g.materialize(self._gain_shape(self.weight_v))  # type: ignore[attr-defined]
                if self._parameters["bias"] is not None:
                    self._parameters["bias"].materialize([getattr(self, self._outputs)])  # type: ignore[attr-defined]
                self.reset_parameters()

    def _channel_of(self, input: Tensor) -> int:
        """Which dim of the input numbers its channels; a wrong input is refused before the layer takes its shape."""
        floating("x", input)
        if isinstance(self, nn.Linear):
            if input.dim() == 0:
                raise ValueError("x: shape [] does not fit; use [..., in_features]")
            return -1
        assert isinstance(self, nn.modules.conv._ConvNd)
        spatial = len(self.kernel_size)
        if input.dim() not in (spatial + 1, spatial + 2):
            wanted = f"[N, in_channels, {', '.join('DHW'[-spatial:])}]"
            raise ValueError(f"x: shape {list(input.shape)} does not fit; use {wanted}, or the same without N")
        return -1 - spatial

    def _weight_shape(self, inputs: int, outputs: int) -> list[int]:
        if isinstance(self, nn.Linear):
            return [outputs, inputs]
        assert isinstance(self, nn.modules.conv._ConvNd)
        divide(self.groups, inputs, outputs)
        if self.transposed:
            return [inputs, outputs // self.groups, *self.kernel_size]
        return [outputs, inputs // self.groups, *self.kernel_size]


class WNLazyLinear(_Lazy, WNLinear):
    """``WNLinear`` that reads ``in_features`` off its first input; other arguments and errors are its."""

    _inputs, _outputs = "in_features", "out_features"


class WNLazyConv1d(_Lazy, WNConv1d):
    """``WNConv1d`` that reads ``in_channels`` off its first input; other arguments and errors are its."""


class WNLazyConv2d(_Lazy, WNConv2d):
    """``WNConv2d`` that reads ``in_channels`` off its first input; other arguments and errors are its."""


class WNLazyConv3d(_Lazy, WNConv3d):
    """``WNConv3d`` that reads ``in_channels`` off its first input; other arguments and errors are its."""


class WNLazyConvTranspose1d(_Lazy, WNConvTranspose1d):
    """``WNConvTranspose1d`` that reads ``in_channels`` off its first input; other arguments and errors are its."""


class WNLazyConvTranspose2d(_Lazy, WNConvTranspose2d):
    """``WNConvTranspose2d`` that reads ``in_channels`` off its first input; other arguments and errors are its."""


class WNLazyConvTranspose3d(_Lazy, WNConvTranspose3d):
    """``WNConvTranspose3d`` that reads ``in_channels`` off its first input; other arguments and errors are its."""
