"""What the tests of whole runs share: a small one, and its weights."""

from pathlib import Path

import torch
from torch import Tensor

from wnfused.train import TrainConfig, checkpoint

SMALL = TrainConfig(depth=16, data="digits", epochs=2, batch_size=64, lr=0.02, warmup=1)


def weights(out: Path) -> dict[str, Tensor]:
    return checkpoint.load(out / "last.ckpt")["state_dict"]


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
