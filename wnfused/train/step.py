"""The step that everything else is built around: a model and a batch to a loss and what is counted.

    loss = worth * sum over real i of ( share_i * CE(z_i, label_i) + (1 - share_i) * CE(z_i, partner_i) )

with ``z = model(images)`` and CE the cross-entropy. It knows nothing of Lightning, processes or epochs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wnfused.train.batches import Batch


class Outcome(NamedTuple):
    """``loss``: what is differentiated. ``counts``: float64 ``[3]``, over the real images: the sum of their losses, how
    many were classified right (by their own label), and how many they are."""

    loss: Tensor
    counts: Tensor


def step(model: nn.Module, batch: Batch) -> Outcome:
    """One forward pass. The cross-entropy is taken in float32 at least."""
    logits = model(batch.images)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    share = batch.share.to(logits.dtype)
    losses = F.cross_entropy(logits, batch.labels, reduction="none") * share
    if batch.partners is not None:
        losses = losses + F.cross_entropy(logits, batch.partners, reduction="none") * (1 - share)
    lost = torch.where(batch.real, losses, 0.0).sum()
    right = (logits.detach().argmax(1) == batch.labels) & batch.real
    counts = torch.stack([lost.detach().double(), right.sum().double(), batch.real.sum().double()])
    return Outcome(lost * batch.worth, counts)


def summary(counts: Tensor) -> tuple[float, float]:
    """(mean loss, accuracy as a share of 1) of summed ``counts``."""
    lost, right, images = counts.tolist()
    return lost / images, right / images
