"""A forward pass that leaves a model as it was: whether a sample fits is known before anything is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from wnfused.dispatch import BackendUnavailableError

Sample = Tensor | tuple[Tensor, ...] | None


def try_sample(model: nn.Module, sample: Sample, *, settle: bool) -> None:
    """Runs the model on the sample. Lazy layers take their shapes; buffers, modes and random state stay.

    Args:
        settle: whether batch norms take the sample's statistics, as they do where a scheme looks at data.

    Raises:
        ValueError: the model does not run on it; the cause is the model's own error.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    kept = [buffer for buffer in model.buffers() if not is_lazy(buffer)]
    with torch.random.fork_rng(devices=devices), buffers_kept(kept), evaluating(model, settle=settle), torch.no_grad():
        try:
            model(*arguments_of(sample))
        except BackendUnavailableError:
            raise
        except Exception as error:  # it is the user's own code that runs, which may raise anything
            raise ValueError(f"sample: the model does not run on it: {error}") from error


def arguments_of(sample: Sample) -> tuple[Tensor | None, ...]:
    """The model's arguments: a tuple is taken for several."""
    return sample if isinstance(sample, tuple) else (sample,)


@contextlib.contextmanager
def evaluating(model: nn.Module, *, settle: bool) -> Iterator[None]:
    """Evaluation mode; where ``settle`` says so, but for batch norms, whose running statistics are put back."""
    modes = {module: module.training for module in model.modules()}
    norms = [module for module in model.modules() if settle and isinstance(module, _BatchNorm)]
    model.eval()
    for norm in norms:
        norm.training = True
    try:
        with buffers_kept([buffer for norm in norms for buffer in norm.buffers()]):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def buffers_kept(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards these hold what they held before."""
    before = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
