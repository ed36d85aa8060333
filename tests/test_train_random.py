"""Random numbers that depend on nothing but (seed, epoch, index, stream)."""

import pytest
import torch

from wnfused.train import random
from wnfused.train.random import Stream

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of SplitMix64 in Python's unbounded integers, as the algorithm is published."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("x", [0, 1, 12345, 2**63 - 1, 2**63, MASK])
def test_the_mixer_is_splitmix64(x: int) -> None:
    word = (x + 0x9E3779B97F4A7C15) & MASK
    mixed = random._mix(torch.tensor(random._signed(word)))
    assert mixed.item() & MASK == splitmix64(x)


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    whole = random.uniform(3, 5, torch.arange(100), Stream.FLIP)
    alone = random.uniform(3, 5, torch.tensor([42, 7]), Stream.FLIP)
    assert torch.equal(alone, whole[[42, 7]])


@pytest.mark.parametrize(
    ("seed", "epoch", "stream"),
    [(1, 0, Stream.ORDER), (0, 1, Stream.ORDER), (0, 0, Stream.FLIP), (2**40, 0, Stream.ORDER)],
)
def test_seed_epoch_and_stream_each_change_everything(seed: int, epoch: int, stream: Stream) -> None:
    index = torch.arange(1000)
    one = random.uniform(0, 0, index, Stream.ORDER)
    other = random.uniform(seed, epoch, index, stream)
    # Correlation of independent samples: standard deviation 1 / sqrt(1000); five of them.
    assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 5 / 1000**0.5


def test_uniform_is_uniform() -> None:
    u = random.uniform(7, 2, torch.arange(100_000), Stream.CROP_ROW)
    counts = torch.histc(u, 10, 0, 1)
    # Each count is binomial with standard deviation sqrt(1e5 * 0.09) = 95; five of them.
    assert (counts - 10_000).abs().max() < 5 * 95
    assert u.min() >= 0
    assert u.max() < 1


def test_permutation() -> None:
    order = random.permutation(1293, seed=0, epoch=0)
    assert torch.equal(order.sort().values, torch.arange(1293))
    assert not torch.equal(order, random.permutation(1293, seed=0, epoch=1))
    assert torch.equal(order, random.permutation(1293, seed=0, epoch=0))
