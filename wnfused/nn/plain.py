"""torch's layers with what a weight-normalised layer does besides: what ``wnfused.fold`` leaves behind.

A fused activation rides on torch's own layer as a child module and a forward hook: the layer stays torch's, ``weight``
and the names in a state dict stay where they were. Only a layer that is called with a residual needs a class.
"""

from __future__ import annotations

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


class WithResidual(nn.Module):
    """Mixin: ``op(input, w) + b + residual``, for a layer whose model calls it with a residual."""

    residual_position = 1

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = super().forward(input)
        return y if residual is None else y + residual


class _TransposeWithResidual(nn.Module):
    """``WithResidual`` with the further argument of torch's transposed convolutions."""

    residual_position = 2

    def forward(self, input: Tensor, output_size: list[int] | None = None, residual: Tensor | None = None) -> Tensor:
        y: Tensor = super().forward(input, output_size)
        return y if residual is None else y + residual


class LinearWithResidual(WithResidual, nn.Linear):
    """``nn.Linear`` that takes a residual."""


class Conv1dWithResidual(WithResidual, nn.Conv1d):
    """``nn.Conv1d`` that takes a residual."""


class Conv2dWithResidual(WithResidual, nn.Conv2d):
    """``nn.Conv2d`` that takes a residual."""


class Conv3dWithResidual(WithResidual, nn.Conv3d):
    """``nn.Conv3d`` that takes a residual."""


class ConvTranspose1dWithResidual(_TransposeWithResidual, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` that takes a residual."""


class ConvTranspose2dWithResidual(_TransposeWithResidual, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` that takes a residual."""


class ConvTranspose3dWithResidual(_TransposeWithResidual, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` that takes a residual."""


WITH_RESIDUAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LinearWithResidual,
    nn.Conv1d: Conv1dWithResidual,
    nn.Conv2d: Conv2dWithResidual,
    nn.Conv3d: Conv3dWithResidual,
    nn.ConvTranspose1d: ConvTranspose1dWithResidual,
    nn.ConvTranspose2d: ConvTranspose2dWithResidual,
    nn.ConvTranspose3d: ConvTranspose3dWithResidual,
}
