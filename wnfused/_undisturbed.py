"""What running a model leaves behind is put back: its buffers, its modes and torch's random state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def as_written() -> contextlib.AbstractContextManager[object]:
    """While this holds, compiled modules run as they were written: what they were compiled to calls no new hooks,
    and has no second derivative."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the buffers that it had, and they hold what they held."""
    # The table of a module of TorchScript is a view that cannot be filled anew.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    tables = [(module, dict(module._buffers)) for module in modules]
    values = [(b, b.detach().clone()) for b in model.buffers() if not is_lazy(b) and not is_expanded(b)]
    try:
        yield
    finally:
        for module, buffers in tables:
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, value in values:
            # Not seen by autograd: a graph that saved the buffer, and that the caller still holds, goes on to fit it.
            buffer.data.copy_(value)


def is_expanded(buffer: Tensor) -> bool:
    """Whether entries share memory, so that torch refuses to write to it."""
    if buffer.layout != torch.strided:
        return False
    return any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True))


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def forked(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Random numbers drawn inside (dropout) do not move torch's state, and start from ``seed`` if it is given."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        if seed is not None:  # of the generators that are put back alone: torch.manual_seed takes those of all devices
            torch.default_generator.manual_seed(seed)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(seed)
        yield
