"""How large activations and gradients are, layer by layer: what an initialisation is judged by.

At station ``l`` of a network, with outputs ``h^l_i`` and loss ``l_i`` of sample i,

    activation = mean_i ||h^l_i||_2,        gradient = mean_i ||d l_i / d h^l_i||_2,

the quantities of figure 1 of Arpit, Campos & Bengio (2019); for an initialisation that keeps them, neither grows nor
fades with the depth. Stations are, in the order of execution, the residual blocks, those of a stacked stage included,
and the layers with parameters outside of blocks; or whatever a filter selects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wnfused.models.resnet import BatchNormBlock
from wnfused.nn import PlainResidualBlock, WNResidualBlock, WNResidualStage

Filter = Callable[[str, nn.Module], bool]

_BLOCKS = (WNResidualBlock, PlainResidualBlock, BatchNormBlock)


@dataclass(frozen=True)
class Norms:
    """One station. ``gradient`` is NaN where the loss does not depend on it."""

    name: str
    activation: float
    gradient: float


def layer_norms(
    model: nn.Module,
    images: Tensor,
    targets: Tensor | None = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    filter: Filter | None = None,
) -> list[Norms]:
    """One forward and backward pass, measured at every station; parameters and their ``.grad`` stay as they are.

    Norms are taken in float64 as each output appears, so no activation outlives its use.

    Args:
        images: ``[n, ...]``, floating point.
        targets: whatever ``loss`` takes as its second argument; None: the class that the model itself holds for
            likeliest, for each sample.
        loss: from (outputs, targets) to the *sum* of the samples' losses, so that a sample's gradient does not depend
            on how many there are; default: cross-entropy.
        filter: from (name, module) to whether its output is a station. A stage for which it is true of the stage
            itself, as by default, is measured block by block.

    Raises:
        ValueError: without samples.
    """
    if images.shape[0] == 0:
        raise ValueError(f"images: shape {tuple(images.shape)} has no sample to measure")
    record = _Record()
    images = images.detach().clone().requires_grad_()
    with torch.enable_grad(), _hooked(model, filter or _default_filter(model), record):
        outputs = model(images)
        if targets is None:
            targets = outputs.detach().argmax(1)
        total = (loss or _cross_entropy)(outputs, targets)
        # Towards the images alone: no parameter's .grad is touched.
        torch.autograd.grad(total, images)
    return record.norms()


class _Record:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.activations: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}

    def take(self, name: str, output: Tensor) -> None:
        """Measure ``output`` now, and its gradient when the backward pass comes by."""
        station = len(self.names)
        self.names.append(name)
        self.activations.append(_mean_norm(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gradients.update({station: _mean_norm(gradient)}))

    def norms(self) -> list[Norms]:
        nan = torch.tensor(float("nan"))
        return [
            Norms(name, self.activations[i].item(), self.gradients.get(i, nan).item())
            for i, name in enumerate(self.names)
        ]


def _mean_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().flatten(1), dim=1, dtype=torch.float64).mean()


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def _default_filter(model: nn.Module) -> Filter:
    """Blocks and stages as a whole; outside of them every module that has parameters of its own."""
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, _BLOCKS)
        for part in module.modules()
        if part is not module
    }

    def selected(name: str, module: nn.Module) -> bool:
        if isinstance(module, (*_BLOCKS, WNResidualStage)):
            return True
        return id(module) not in inside and next(module.parameters(recurse=False), None) is not None

    return selected


@contextlib.contextmanager
def _hooked(model: nn.Module, filter: Filter, record: _Record) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for name, module in model.named_modules():
            if not filter(name, module):
                continue
            if isinstance(module, WNResidualStage):
                undo.enter_context(_block_by_block(name, module, record))
            else:
                handle = module.register_forward_hook(_observer(name, record))
                undo.callback(handle.remove)
        yield


def _observer(name: str, record: _Record) -> Callable[[nn.Module, object, Tensor], None]:
    def observe(module: nn.Module, inputs: object, output: Tensor) -> None:
        record.take(name, output)

    return observe


@contextlib.contextmanager
def _block_by_block(name: str, stage: WNResidualStage, record: _Record) -> Iterator[None]:
    """While this holds, the stage runs its blocks one after the other instead of as one op."""

    def forward(x: Tensor) -> Tensor:
        if stage.transition is not None:
            # A module, with a hook of its own.
            x = stage.transition(x)
        for i, block in enumerate(stage.blocks()):
            x = block(x)
            record.take(f"{name}.blocks.{i}", x)
        return x

    # An attribute of the instance hides the method of its class.
    stage.__dict__["forward"] = forward
    try:
        yield
    finally:
        del stage.__dict__["forward"]
