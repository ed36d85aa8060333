"""Which images form which mini-batch, on which process, and what each weighs in the loss.

One *mini-batch* of ``batch_size`` images is shared by all processes, and ``accumulate`` mini-batches make one update:

    epoch (n images, permuted by (seed, epoch)) -> updates -> mini-batches -> one part for each process

The last update and the last mini-batch of an epoch may be smaller; nothing is dropped. Every process gets the same
number of images (collective operations need that), so a part may be padded with repeated images that do not count.
An update is the gradient of the *mean over its images*, however they are split: Lightning divides each loss by
``accumulate`` and DDP and FSDP average gradients over ``world`` processes, so an image of an update of U images
weighs ``accumulate * world / U`` in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wnfused.train import random
from wnfused.train.augment import Augmentation
from wnfused.train.data import Dataset, Split


class Batch(NamedTuple):
    """What the model and the loss get. Without mixup ``share`` is 1 and ``partners`` None.

    images float32 ``[n, channels, height, width]``; labels and partners int64 ``[n]``; share float32 ``[n]``, the
    part of each image that its own label describes; real bool ``[n]``, False for padding; worth: the weight of a
    real image in the loss.
    """

    images: Tensor
    labels: Tensor
    partners: Tensor | None
    share: Tensor
    real: Tensor
    worth: float


class Part(NamedTuple):
    """One process's part of a mini-batch: int64 indices into the split; ``real`` and ``worth`` as in ``Batch``."""

    indices: Tensor
    real: Tensor
    worth: float


@dataclass(frozen=True)
class Plan:
    """The division of ``n`` images; ``batch_size`` counts the images of all processes together."""

    n: int
    batch_size: int
    accumulate: int = 1
    world: int = 1
    rank: int = 0

    @property
    def batches(self) -> int:
        """Mini-batches an epoch."""
        return math.ceil(self.n / self.batch_size)

    @property
    def updates(self) -> int:
        """Updates of the parameters an epoch."""
        return math.ceil(self.batches / self.accumulate)

    def parts(self, order: Tensor) -> Iterator[Part]:
        """This process's part of each mini-batch of ``order`` (int64 ``[n]``)."""
        for update in order.split(self.batch_size * self.accumulate):
            worth = self.accumulate * self.world / len(update)
            for batch in update.split(self.batch_size):
                size = math.ceil(len(batch) / self.world)
                # Process r takes every world-th image; a position beyond the batch is padding.
                position = self.rank + self.world * torch.arange(size)
                yield Part(batch[position % len(batch)], position < len(batch), worth)


class TrainBatches:
    """The training batches of one epoch after the other; what Lightning takes for a dataloader.

    ``set_epoch`` is called by Lightning, through ``sampler``, before it iterates. All images lie in memory and a
    whole batch is augmented at once, so there are no worker processes.
    """

    def __init__(self, data: Dataset, plan: Plan, augmentation: Augmentation, seed: int) -> None:
        self.data, self.plan, self.augmentation, self.seed = data, plan, augmentation, seed
        self.epoch = 0

    @property
    def sampler(self) -> TrainBatches:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.plan.batches

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing is decided before the first batch is asked for, after set_epoch.
        order = random.permutation(self.plan.n, self.seed, self.epoch)
        for part in self.plan.parts(order):
            images, labels, partners, share = self.augmentation(self.data, part.indices, self.seed, self.epoch)
            yield Batch(images, labels, partners, share, part.real, part.worth)


class EvalBatches:
    """A split in its own order, unchanged images."""

    def __init__(self, data: Dataset, split: Split, plan: Plan) -> None:
        self.data, self.split, self.plan = data, split, plan

    def __len__(self) -> int:
        return self.plan.batches

    def __iter__(self) -> Iterator[Batch]:
        for part in self.plan.parts(torch.arange(self.plan.n)):
            labels = self.split.labels[part.indices]
            images = self.data.standardise(self.split.images[part.indices])
            yield Batch(images, labels, None, torch.ones(len(labels)), part.real, part.worth)
