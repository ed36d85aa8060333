"""One decision for all processes of a group: the first one initialises, the others receive."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from wnfused._modules import is_sharded, sharded_error
from wnfused.init.skip_scale import restore_sums_, scale_sums_, scaled_sums

T = TypeVar("T")


def decided_by_first_process(model: nn.Module, initialise: Callable[[], T]) -> T:
    """Runs ``initialise`` in the first process and gives its result and its parameters to all; or raises its error.

    Without a process group it just runs. The devices are those of each process's own parameters.

    Raises:
        ValueError: the parameters are sharded, other ones than in the first process, or, in several processes, without
            a shape yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return initialise()
    _check_agreement(model)
    if dist.get_world_size() == 1:
        return initialise()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [(initialise(), scaled_sums(model))]
        except Exception as error:  # every process must hear of it, or the others wait for ever
            outcome = [error]
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None and dist.get_backend() == "nccl" else torch.device("cpu")
    dist.broadcast_object_list(outcome, src=0, device=device)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    result: T
    result, factors = outcome[0]
    if dist.get_rank() > 0:
        restore_sums_(model)
        for name, factor in factors.items():
            scale_sums_(model.get_submodule(name), factor)
    for tensor in model.parameters():
        dist.broadcast(tensor.detach(), src=0)
    return result


def _check_agreement(model: nn.Module) -> None:
    """Every process raises, or none: one that went on alone would wait for the others for ever."""
    held = [(name, None if is_lazy(p) else list(p.shape), is_sharded(p)) for name, p in model.named_parameters()]
    gathered: list[Any] = [held] * dist.get_world_size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, held)
    for name, shape, sharded in itertools.chain.from_iterable(gathered):
        if sharded:
            raise sharded_error(f"model: {name!r}", "initialise the model first, then shard it")
        if shape is None and len(gathered) > 1:  # only the first process has it run on the sample
            raise ValueError(f"model: {name!r} has no shape yet; run the model once, in every process")
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            raise ValueError(
                f"model: process {rank} holds other parameters than process 0; all processes of a group initialise one "
                "model together, so initialise the whole before it is split into parts"
            )
