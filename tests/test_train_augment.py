"""Augmentation, image by image against a plain loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wnfused.train import random
from wnfused.train.augment import Augmentation
from wnfused.train.data import Dataset, load
from wnfused.train.random import Stream

INDICES = torch.tensor([3, 17, 500, 899, 0])


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load("synthetic")


def images_of(augmentation: Augmentation, data: Dataset, indices: Tensor = INDICES, epoch: int = 2) -> Tensor:
    return augmentation(data, indices, 0, epoch)[0]


def draw(n: int, index: int, stream: Stream) -> int:
    return int(random.below(n, 0, 2, torch.tensor(index), stream))


def test_without_any_the_images_are_only_standardised(data: Dataset) -> None:
    images, labels, partners, share = Augmentation()(data, INDICES, 0, 2)
    assert torch.equal(images, data.standardise(data.train.images[INDICES]))
    assert torch.equal(labels, data.train.labels[INDICES])
    assert partners is None
    assert (share == 1).all()


def test_crop_and_flip(data: Dataset) -> None:
    images = images_of(Augmentation(crop_flip=True), data)
    for image, index in zip(images, INDICES.tolist(), strict=True):
        top, left = draw(9, index, Stream.CROP_ROW), draw(9, index, Stream.CROP_COLUMN)
        expected = F.pad(data.train.images[index], (4, 4, 4, 4))[:, top : top + 16, left : left + 16]
        if draw(2, index, Stream.FLIP):
            expected = expected.flip(-1)
        assert torch.equal(image, data.standardise(expected))


def test_crops_and_flips_take_every_value(data: Dataset) -> None:
    index = torch.arange(900)
    assert random.below(9, 0, 2, index, Stream.CROP_ROW).unique().tolist() == list(range(9))
    flips = random.below(2, 0, 2, index, Stream.FLIP).sum().item()
    # Binomial(900, 1/2): standard deviation 15; five of them.
    assert abs(flips - 450) < 75


@pytest.mark.parametrize("length", [1, 5, 16])
def test_cutout(data: Dataset, length: int) -> None:
    images = images_of(Augmentation(cutout=length), data)
    for image, index in zip(images, INDICES.tolist(), strict=True):
        top = draw(16, index, Stream.CUTOUT_ROW) - length // 2
        left = draw(16, index, Stream.CUTOUT_COLUMN) - length // 2
        expected = data.standardise(data.train.images[index]).clone()
        expected[:, max(top, 0) : max(top + length, 0), max(left, 0) : max(left + length, 0)] = 0
        assert torch.equal(image, expected)


def test_the_smallest_square_that_leaves_nothing(data: Dataset) -> None:
    """Images of 16x16, whose centres may lie in any of their pixels."""
    every = torch.arange(len(data.train))
    assert not images_of(Augmentation(cutout=31), data, every).any()
    assert images_of(Augmentation(cutout=30), data, every).any()


def test_mixup(data: Dataset) -> None:
    images, labels, partners, share = Augmentation(mixup=0.4)(data, INDICES, 0, 2)
    for i, index in enumerate(INDICES.tolist()):
        partner = draw(len(data.train), index, Stream.MIXUP_PARTNER)
        assert labels[i] == data.train.labels[index]
        assert partners[i] == data.train.labels[partner]
        own, other = (data.standardise(data.train.images[j]) for j in (index, partner))
        torch.testing.assert_close(images[i], share[i] * own + (1 - share[i]) * other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_mixup_shares_are_beta_distributed(data: Dataset, alpha: float) -> None:
    share = Augmentation(mixup=alpha)(data, torch.arange(900), 0, 2)[3].double()
    variance = 1 / (4 * (2 * alpha + 1))
    # Means of 900 draws; their standard errors, times five.
    assert abs(share.mean() - 0.5) < 5 * (variance / 900) ** 0.5
    assert abs(share.var() - variance) < 5 * variance * (2 / 900) ** 0.5


@pytest.mark.parametrize("augmentation", [Augmentation(True), Augmentation(False, 5), Augmentation(True, 3, 0.4)])
def test_an_image_does_not_depend_on_its_batch_but_on_the_epoch(data: Dataset, augmentation: Augmentation) -> None:
    together = images_of(augmentation, data)
    alone = images_of(augmentation, data, INDICES[2:3])
    assert torch.equal(together[2:3], alone)
    assert not torch.equal(together, images_of(augmentation, data, epoch=3))
