"""The plain step as Lightning wants it: what is optimised, what is counted, and when a run has diverged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn

from wnfused.nn import fixup_scalars
from wnfused.train import random
from wnfused.train.batches import Batch
from wnfused.train.config import TrainConfig
from wnfused.train.graph import GraphedModel
from wnfused.train.schedule import Schedule
from wnfused.train.step import Outcome, step, summary

# How often a GPU is asked whether all losses were finite: each time it has to finish what was queued.
_UPDATES_BETWEEN_CHECKS = 50


class DivergedError(RuntimeError):
    """A loss was NaN or infinite. Raised on all processes at the same mini-batch."""


# Of the learning rate, for Fixup's scalars, as in its published code.
_SCALARS_SHARE = 0.1


def _groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    scalars = fixup_scalars(model)
    if not scalars:
        return [{"params": list(model.parameters())}]
    known = {id(parameter) for parameter in scalars}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [{"params": others}, {"params": scalars, "lr": lr * _SCALARS_SHARE}]


class TrainingModule(lightning.LightningModule):
    """``history`` holds one row for each finished epoch: epoch, lr, train_loss, train_accuracy, val_loss and
    val_accuracy. ``tested`` is the (loss, accuracy) of the last evaluation of the test split."""

    def __init__(self, model: nn.Module, config: TrainConfig, updates_per_epoch: int) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.updates_per_epoch = updates_per_epoch
        self.schedule = Schedule(config.lr, config.warmup, config.milestones, config.factor)
        self.history: list[dict[str, float]] = []
        self.tested = (float("nan"), 0.0)
        self._counts = torch.zeros(3, dtype=torch.float64)
        self._validated = (float("nan"), 0.0)
        self._finite = torch.tensor(True)
        self._graphed: GraphedModel | None = None

    def forward(self, images: Tensor) -> Tensor:
        if not (self.config.cuda_graph and self.training):
            return self.model(images)
        if self._graphed is None:
            autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
            self._graphed = GraphedModel(self.model, images, autocast, accumulates=self.config.accumulate > 1)
        return self._graphed(images)

    def configure_optimizers(self) -> Any:
        config = self.config
        optimizer = torch.optim.SGD(
            _groups(self.model, config.lr), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        n = self.updates_per_epoch
        ramp = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: self.schedule.share(update // n, update % n, n)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ramp, "interval": "step"}}

    # ---------------------------------------------------------------------------------------------- training

    def on_train_epoch_start(self) -> None:
        self._reset_counts()
        self._finite = torch.tensor(True, device=self.device)
        # Models with dropout draw from torch's generator: that, too, is a function of (seed, epoch, process).
        where = torch.tensor(self.global_rank)
        torch.manual_seed(int(random.bits(self.config.seed, self.current_epoch, where, random.Stream.MODULES)))

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        outcome = step(self, batch)
        self._count(outcome)
        self._finite &= outcome.loss.detach().isfinite()
        if self._time_to_check(batch_index) and self._any_process(not bool(self._finite)):
            raise DivergedError
        return outcome.loss

    def on_train_epoch_end(self) -> None:
        loss, accuracy = summary(self._summed_counts())
        val_loss, val_accuracy = self._validated
        n = self.updates_per_epoch
        self.history.append(
            {
                "epoch": self.current_epoch,
                "lr": self.schedule.at(self.current_epoch, n - 1, n),
                "train_loss": loss,
                "train_accuracy": accuracy,
                "val_loss": val_loss,
                "val_accuracy": val_accuracy,
            }
        )

    def _time_to_check(self, batch_index: int) -> bool:
        last = batch_index + 1 == self.trainer.num_training_batches
        return self.device.type == "cpu" or last or (batch_index + 1) % _UPDATES_BETWEEN_CHECKS == 0

    def _any_process(self, mine: bool) -> bool:
        return self.trainer.strategy.reduce_boolean_decision(mine, all=False)

    # ---------------------------------------------------------------------------------- validation and test

    def on_validation_epoch_start(self) -> None:
        self._train_counts = self._counts
        self._reset_counts()

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self._count(step(self, batch))

    def on_validation_epoch_end(self) -> None:
        self._validated = summary(self._summed_counts())
        self._counts = self._train_counts

    def on_test_epoch_start(self) -> None:
        self._reset_counts()

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self._count(step(self, batch))

    def on_test_epoch_end(self) -> None:
        self.tested = summary(self._summed_counts())

    # ----------------------------------------------------------------------------------------------- counts

    def _reset_counts(self) -> None:
        self._counts = torch.zeros(3, dtype=torch.float64, device=self.device)

    def _count(self, outcome: Outcome) -> None:
        self._counts = self._counts + outcome.counts

    def _summed_counts(self) -> Tensor:
        return self.trainer.strategy.reduce(self._counts, reduce_op="sum")

    # ------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["wnfused"] = {"config": self.config.to_dict(), "history": self.history}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = list(checkpoint["wnfused"]["history"])
