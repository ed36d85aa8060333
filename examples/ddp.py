"""Data parallel: each process holds the whole network and runs its share of every batch.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from common import LR, batches, learnt_alone, leave, loss, network, report
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(network())  # convert, fold and initialise before this line
optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
for images, labels in batches():
    optimiser.zero_grad()
    loss(model(images.chunk(world)[rank]), labels.chunk(world)[rank]).backward()
    optimiser.step()

if rank == 0:
    report("DDP", model.module.state_dict(), learnt_alone())
leave()
