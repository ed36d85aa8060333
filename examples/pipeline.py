"""Pipeline parallel: the network is cut between stages, each process holds one part and hands its maps on.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from common import LR, batches, learnt_alone, leave, loss, network, report
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()

net = network()
if rank == 0:
    part: nn.Module = nn.Sequential(net.stem, net.stages[0])
else:
    part = nn.Sequential(net.stages[1], net.stages[2], nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.head)
optimiser = torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9)
schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=2, loss_fn=loss)

for images, labels in batches():
    optimiser.zero_grad()
    if rank == 0:
        schedule.step(images)
    else:
        schedule.step(target=labels)
    optimiser.step()

# Each process has trained its own layers of ``net`` in place.
mine = {name for name, parameter in net.named_parameters() if any(parameter is p for p in part.parameters())}
found = {name: value for name, value in net.state_dict().items() if name in mine}
expected = {name: value for name, value in learnt_alone().items() if name in mine}
report(f"pipeline part {rank}", found, expected)
leave()
