"""The learning rate before every update: the paper's quadratic warm-up, then steps.

With ``n`` updates an epoch, before update ``i = 0, 1, ...`` of epoch ``e = 0, 1, ...`` and a warm-up of ``T`` epochs

    lr = lr0 * ((e + (i + 1) / n) / T)^2          during the first T epochs,
    lr = lr0 * factor^(milestones m <= e)         afterwards

(Arpit, Campos & Bengio 2019, section 5; that the ramp is quadratic stands in their code only).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Attributes: ``lr`` the full rate ``lr0``; ``warmup`` is T in epochs, fractions allowed, 0 for none;
    ``milestones`` the epochs (counted from 0) from which on the rate is multiplied by ``factor`` once more."""

    lr: float
    warmup: float = 0.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def at(self, epoch: int, update: int, updates_per_epoch: int) -> float:
        """The rate used *for* update ``update`` (from 0) of epoch ``epoch`` (from 0)."""
        return self.lr * self.share(epoch, update, updates_per_epoch)

    def share(self, epoch: int, update: int, updates_per_epoch: int) -> float:
        """The same rate as a share of ``lr``."""
        begun = epoch + update / updates_per_epoch
        if begun < self.warmup:
            done = epoch + (update + 1) / updates_per_epoch
            # A fractional warm-up may end inside an update: the ramp never exceeds the full rate.
            return min(1.0, done / self.warmup) ** 2
        return self.factor ** sum(epoch >= milestone for milestone in self.milestones)
