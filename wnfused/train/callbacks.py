"""What happens around the steps: checkpoints after each epoch, the clock, and reports of progress."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from wnfused.train.checkpoint import load, save
from wnfused.train.interruption import raises_after
from wnfused.train.module import TrainingModule


class Reporter(Protocol):
    """Who wants to hear how a run goes. Called on the first process only."""

    def on_batch(self, epoch: int, done: int, batches: int) -> None:
        """``done`` of the ``batches`` mini-batches of epoch ``epoch`` (from 0) are done."""

    def on_epoch(self, row: dict[str, float]) -> None:
        """An epoch, its validation and its checkpoint are done; ``row`` is its row of the history."""


class AtomicCheckpoints(CheckpointIO):
    """Lightning's checkpoints, written and read by ``wnfused.train.checkpoint``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save(path, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        return load(path)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class EpochCheckpoint(Checkpoint):
    """``best.ckpt`` (weights) where validation accuracy is higher than in every epoch before, then ``last.ckpt``.

    In this order: a process killed between the two resumes at the epoch before, trains the same epoch again and
    finds the same best. Being a ``Checkpoint``, it is called after the module has written its history.

    Attributes:
        epochs: how many epochs ``last.ckpt`` holds; 0 until it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.epochs = folder, 0

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if best_epoch(module.history) == len(module.history) - 1:
            trainer.save_checkpoint(self.folder / "best.ckpt", weights_only=True)
        trainer.save_checkpoint(self.folder / "last.ckpt", weights_only=False)
        self.epochs = len(module.history)


def best_epoch(history: list[dict[str, float]]) -> int:
    """The first epoch with the highest validation accuracy."""
    return max(range(len(history)), key=lambda epoch: (history[epoch]["val_accuracy"], -epoch))


class Clock(Callback):
    """Wall time of the updates, with what comes between them (data, optimiser), without validation and checkpoints.

    The first update of the process is left out, unless it is the only one: it allocates, and may compile. A GPU is
    waited for at the ends of each measured stretch only. A checkpoint holds the mean, for a process that goes on from
    it and has nothing to train.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._updates = 0
        self._first = 0.0  # until there is one, what the checkpoint says
        self._began = 0.0
        self._before = 0
        self._warm = False

    @property
    def seconds_per_step(self) -> float:
        """Mean over the measured updates of this process, else of the one that wrote its checkpoint; 0 if there was
        none in either."""
        return self._seconds / self._updates if self._updates else self._first

    def state_dict(self) -> dict[str, float]:
        return {"seconds_per_step": self.seconds_per_step}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._first = state_dict["seconds_per_step"]

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        self._began = _now(module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        last = done == trainer.num_training_batches
        if not self._warm and (done % trainer.accumulate_grad_batches == 0 or last):
            self._warm = True
            self._first, self._before = _now(module) - self._began, trainer.global_step
            self._began = _now(module)
        elif last:
            self._seconds += _now(module) - self._began
            self._updates += trainer.global_step - self._before
        if last:
            self._before = trainer.global_step


class Interruptions(Callback):
    """SIGTERM raises at once, as Ctrl-C does.

    Lightning's own handler, which is set when a run starts, broadcasts to the other processes from within whatever it
    interrupts; where that is another collective, all wait for ever.
    """

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._before = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, raises_after(self._before))

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        self.on_train_start(trainer, module)


class Report(Checkpoint):
    """Passes Lightning's hooks on to a ``Reporter``; a ``Checkpoint`` for the same reason as ``EpochCheckpoint``."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            self.reporter.on_batch(trainer.current_epoch, batch_idx + 1, int(trainer.num_training_batches))

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            self.reporter.on_epoch(module.history[-1])


def _now(module: TrainingModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
