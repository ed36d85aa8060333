"""Changes to the training images, each drawn from (seed, epoch, index of the image): crop and flip, cutout, mixup.

In the order of the papers' code: crop and flip on the raw image, then standardisation, then cutout, then mixup.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wnfused.optional import require
from wnfused.train.data import Dataset
from wnfused.train.random import Stream, below, uniform

PADDING = 4


@dataclass(frozen=True)
class Augmentation:
    """Attributes:
    crop_flip: pad by 4 black pixels, crop back to the size at random, mirror left-right with probability 1/2.
    cutout: side in pixels of one square set to 0 after standardisation; its centre is uniform over the image, so
        the square may stick out and be clipped (DeVries & Taylor 2017). 0: none. Arpit et al. use 16.
    mixup: ``x = share x_i + (1 - share) x_j``, ``share ~ Beta(mixup, mixup)``, and the loss mixes both labels
        likewise (Zhang et al. 2018). The partner j is any image of the training split. 0: none.
    """

    crop_flip: bool = False
    cutout: int = 0
    mixup: float = 0.0

    def __call__(
        self, data: Dataset, indices: Tensor, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """``(images, labels, partners' labels, share)`` of the training images ``indices`` (int64 ``[n]``); no partners
        without mixup."""
        labels = data.train.labels[indices]
        images = self._image(data, indices, seed, epoch)
        if not self.mixup:
            return images, labels, None, torch.ones(len(indices))
        partner = below(len(data.train.labels), seed, epoch, indices, Stream.MIXUP_PARTNER)
        share = self._share(uniform(seed, epoch, indices, Stream.MIXUP_SHARE))
        mixed = torch.lerp(self._image(data, partner, seed, epoch), images, share[:, None, None, None])
        return mixed, labels, data.train.labels[partner], share

    def _image(self, data: Dataset, indices: Tensor, seed: int, epoch: int) -> Tensor:
        images = data.train.images[indices]
        if self.crop_flip:
            images = _crop_flip(images, indices, seed, epoch)
        images = data.standardise(images)
        return _cutout(images, self.cutout, indices, seed, epoch) if self.cutout else images

    def _share(self, u: Tensor) -> Tensor:
        """Beta-distributed numbers: the inverse distribution function at uniform ones."""
        special = require("scipy.special", "--mixup")
        return torch.from_numpy(special.betaincinv(self.mixup, self.mixup, u.numpy())).float()


def _crop_flip(images: Tensor, indices: Tensor, seed: int, epoch: int) -> Tensor:
    height, width = images.shape[-2:]
    top = below(2 * PADDING + 1, seed, epoch, indices, Stream.CROP_ROW)
    left = below(2 * PADDING + 1, seed, epoch, indices, Stream.CROP_COLUMN)
    flip = below(2, seed, epoch, indices, Stream.FLIP).bool()
    row = top[:, None] + torch.arange(height)
    column = torch.arange(width).expand(len(indices), width)
    column = left[:, None] + torch.where(flip[:, None], width - 1 - column, column)
    padded = F.pad(images, (PADDING,) * 4)
    image = torch.arange(len(indices))[:, None, None]
    # Advanced indices around the channel slice put the channels last.
    return padded[image, :, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)


def _cutout(images: Tensor, length: int, indices: Tensor, seed: int, epoch: int) -> Tensor:
    height, width = images.shape[-2:]
    top = below(height, seed, epoch, indices, Stream.CUTOUT_ROW) - length // 2
    left = below(width, seed, epoch, indices, Stream.CUTOUT_COLUMN) - length // 2
    rows, columns = torch.arange(height), torch.arange(width)
    in_rows = (rows >= top[:, None]) & (rows < top[:, None] + length)
    in_columns = (columns >= left[:, None]) & (columns < left[:, None] + length)
    hole = in_rows[:, None, :, None] & in_columns[:, None, None, :]
    return images.masked_fill(hole, 0.0)
