"""Which images go where: the division of an epoch among mini-batches and processes."""

import itertools

import pytest
import torch

from wnfused.train.augment import Augmentation
from wnfused.train.batches import EvalBatches, Plan, TrainBatches
from wnfused.train.data import load

DIVISIONS = list(itertools.product([1, 5, 64, 65, 100], [1, 4, 32, 200], [1, 3], [1, 2, 3]))


@pytest.mark.parametrize(("n", "batch_size", "accumulate", "world"), DIVISIONS)
def test_every_image_counts_once_and_an_update_is_a_mean(n: int, batch_size: int, accumulate: int, world: int) -> None:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    plans = [Plan(n, batch_size, accumulate, world, rank) for rank in range(world)]
    ranks = [list(plan.parts(order)) for plan in plans]
    assert {len(parts) for parts in ranks} == {plans[0].batches}
    seen = [part.indices[part.real] for parts in ranks for part in parts]
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(n))
    for batch in zip(*ranks, strict=True):
        assert len({len(part.indices) for part in batch}) == 1, "collective operations need equal parts"
    # What Lightning and DDP make of the weights: 1 / accumulate and the mean over processes.
    batches = list(zip(*ranks, strict=True))
    updates = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    assert len(updates) == plans[0].updates
    for update in updates:
        total = sum(part.worth * part.real.sum().item() for batch in update for part in batch)
        assert total / accumulate / world == pytest.approx(1, rel=1e-12)


def test_mini_batches_do_not_depend_on_the_number_of_processes() -> None:
    order = torch.randperm(100)
    alone = [part.indices.sort().values for part in Plan(100, 32).parts(order)]
    both = zip(*(Plan(100, 32, 1, 2, rank).parts(order) for rank in range(2)), strict=True)
    for one, parts in zip(alone, both, strict=True):
        assert torch.equal(one, torch.cat([p.indices[p.real] for p in parts]).sort().values)


def test_the_last_partial_batch_is_kept_and_epochs_differ() -> None:
    data = load("digits")
    batches = TrainBatches(data, Plan(len(data.train), 500), Augmentation(), seed=0)
    first = [batch.labels for batch in batches]
    assert [len(labels) for labels in first] == [500, 500, 293]
    batches.set_epoch(1)
    assert not torch.equal(next(iter(batches)).labels, first[0])
    batches.set_epoch(0)
    assert torch.equal(next(iter(batches)).labels, first[0])


def test_evaluation_keeps_the_order() -> None:
    data = load("digits")
    batches = list(EvalBatches(data, data.test, Plan(len(data.test), 100)))
    assert torch.equal(torch.cat([b.labels for b in batches]), data.test.labels)
    assert torch.equal(torch.cat([b.images for b in batches]), data.standardise(data.test.images))
    assert all(b.real.all() for b in batches)
