"""Sharded data parallel (FSDP2): each process holds a part of every parameter; then a checkpoint and back.

torchrun --standalone --nproc-per-node 2 examples/fsdp.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import LR, batches, learnt_alone, leave, loss, network, report
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wnfused

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))  # "cuda"


def sharded(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    for stage in model.modules():
        if isinstance(stage, wnfused.WNResidualStage):
            fully_shard(stage, mesh=mesh)  # gathered as one unit, just before it runs
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


model, optimiser = sharded(network())
for step, (images, labels) in enumerate(batches()):
    optimiser.zero_grad()
    loss(model(images.chunk(world)[rank]), labels.chunk(world)[rank]).backward()
    optimiser.step()
    if step == 1:  # save, build everything anew, load, go on
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        weights, moments = get_state_dict(model, optimiser)
        dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=folder[0])
        model, optimiser = sharded(network())
        weights, moments = get_state_dict(model, optimiser)
        dcp.load({"model": weights, "optimiser": moments}, checkpoint_id=folder[0])
        set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)

whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    report("FSDP2, resumed from a distributed checkpoint", whole, learnt_alone())
leave()
