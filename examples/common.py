"""What the examples share: a small network, its data, and the weights that one process alone would have learnt."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import wnfused

STEPS, BATCH, LR = 3, 8, 0.05


def network() -> nn.Module:
    """A residual network of weight-normalised stages, the same in every process."""
    torch.manual_seed(0)
    return wnfused.models.wrn(depth=16, in_channels=1)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def learnt_alone() -> dict[str, Tensor]:
    """The weights after the same steps in one process."""
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for images, labels in batches():
        optimiser.zero_grad()
        loss(model(images), labels).backward()
        optimiser.step()
    return model.state_dict()


def report(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Prints how far apart two sets of weights are; raises where it is more than the order of float32 sums."""
    assert set(found) == set(expected)
    change = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    print(f"{what}: largest difference to one process {change:.1e}", flush=True)
    assert change < 1e-5


def leave() -> None:
    """Ends the process group when all processes are done.

    A thread of gloo lets go of a collective's tensors a moment after the collective has returned, and needs the
    interpreter for it: where that is ending the process aborts ("terminate called without an active exception",
    pytorch issue 190489). So what ends first waits for the others, and then for its own threads.
    """
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)
