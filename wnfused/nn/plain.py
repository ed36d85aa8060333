"""torch's layers with what a weight-normalised layer does besides: what ``wnfused.fold`` leaves behind.

A fused activation rides on torch's own layer as a child module and a forward hook: the layer stays torch's, ``weight``
and the names in a state dict stay where they were. Only a layer that is called with a residual needs a class.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def apply_activation(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook: the output through the child module ``activation``."""
    activated: Tensor = module.activation(output)  # type: ignore[operator]
    return activated


def attach_activation(module: nn.Module, activation: nn.Module) -> None:
    """Lets a layer apply ``activation`` to its output, before any other hook sees it."""
    module.add_module("activation", activation)
    module.register_forward_hook(apply_activation, prepend=True)


def detach_activation(module: nn.Module) -> nn.Module | None:
    """Undoes ``attach_activation``; the activation, or None where there is none."""
    keys = [key for key, hook in module._forward_hooks.items() if hook is apply_activation]
    for key in keys:
        del module._forward_hooks[key]
    return module._modules.pop("activation") if keys else None


# torch.jit.script reads no super(), so the classes say what torch's do.


class LinearWithResidual(nn.Linear):
    """``nn.Linear`` that takes a residual: ``x w^T + b + residual``."""

    residual_position = 1

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        return y if residual is None else y + residual


class _ConvWithResidual(nn.Module):
    """Mixin: ``op(input, w) + b + residual``, for a layer whose model calls it with a residual."""

    residual_position = 1

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self._conv_forward(input, self.weight, self.bias)  # type: ignore[operator]
        return y if residual is None else y + residual


class Conv1dWithResidual(_ConvWithResidual, nn.Conv1d):
    """``nn.Conv1d`` that takes a residual."""


class Conv2dWithResidual(_ConvWithResidual, nn.Conv2d):
    """``nn.Conv2d`` that takes a residual."""


class Conv3dWithResidual(_ConvWithResidual, nn.Conv3d):
    """``nn.Conv3d`` that takes a residual."""


class _TransposeWithResidual(nn.Module):
    """``_ConvWithResidual`` with the further argument of torch's transposed convolutions."""

    residual_position = 2

    def forward(self, input: Tensor, output_size: list[int] | None = None, residual: Tensor | None = None) -> Tensor:
        dims: int = len(self.kernel_size)  # type: ignore[arg-type]
        extra: list[int] = self._output_padding(  # type: ignore[operator]
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        y: Tensor = self._transposed(input, extra)  # type: ignore[operator]
        return y if residual is None else y + residual


class ConvTranspose1dWithResidual(_TransposeWithResidual, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` that takes a residual."""

    def _transposed(self, input: Tensor, output_padding: list[int]) -> Tensor:
        assert isinstance(self.padding, tuple)
        return F.conv_transpose1d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )


class ConvTranspose2dWithResidual(_TransposeWithResidual, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` that takes a residual."""

    def _transposed(self, input: Tensor, output_padding: list[int]) -> Tensor:
        assert isinstance(self.padding, tuple)
        return F.conv_transpose2d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )


class ConvTranspose3dWithResidual(_TransposeWithResidual, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` that takes a residual."""

    def _transposed(self, input: Tensor, output_padding: list[int]) -> Tensor:
        assert isinstance(self.padding, tuple)
        return F.conv_transpose3d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )


WITH_RESIDUAL: dict[type[nn.Module], type[nn.Module]] = {
    kind.__bases__[-1]: kind
    for kind in (
        LinearWithResidual, Conv1dWithResidual, Conv2dWithResidual, Conv3dWithResidual,
        ConvTranspose1dWithResidual, ConvTranspose2dWithResidual, ConvTranspose3dWithResidual,
    )
}  # fmt: skip
"""By the layer of torch that each extends: all of those that this package knows."""
