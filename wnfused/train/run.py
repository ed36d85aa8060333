"""One training run from a configuration to its result. Lightning drives; the step is ours.

``result.json`` holds

* ``test_accuracy``, ``test_loss``: on the test split, with the weights after the *last* epoch; accuracy is a share of
  1. A run that diverged has accuracy 0, as in the paper, and loss null.
* ``best_epoch``, ``best_val_accuracy``, ``best_test_accuracy``: the epoch (from 0) with the highest validation
  accuracy, the first of equals, and the test accuracy of its weights: the paper's protocol.
* ``train_loss``: mean over the images of the last epoch, each as it was when it was trained on; null if diverged.
* ``diverged``: some loss was NaN or infinite, which ends the run at once.
* ``epochs_finished``, ``updates``; ``history``: one row for each epoch.
* ``seconds_per_step``: mean wall time of an update, 0 if none was finished; ``seconds``: of the whole process, set-up
  included. Both count the last process only if the run was resumed; the first that of the one before if the last had
  only the tests left to do.
* ``peak_memory_bytes``, ``baseline_memory_bytes``: of the first process, see ``wnfused.train.memory``.
* ``parameters``, ``world_size``, ``versions``, and ``config``, the full configuration.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from wnfused._numbers import file_path, flag
from wnfused.dispatch import BackendUnavailableError
from wnfused.optional import require
from wnfused.train.augment import Augmentation
from wnfused.train.batches import EvalBatches, Plan, TrainBatches
from wnfused.train.build import build_with_remarks
from wnfused.train.checkpoint import CorruptCheckpointError
from wnfused.train.checkpoint import load as load_checkpoint
from wnfused.train.config import TrainConfig
from wnfused.train.data import Dataset, load
from wnfused.train.errors import UsageError
from wnfused.train.files import remove_leftovers, write_json
from wnfused.train.folder import RunFolder
from wnfused.train.interruption import InterruptedRun, signal_of
from wnfused.train.launch import is_first_process
from wnfused.train.memory import PeakMemory

# Validation and test hold no activations for a backward pass: larger batches cost no more memory.
_EVAL_BATCH = 256


class Silent:
    """The reporter that says nothing."""

    def on_batch(self, epoch: int, done: int, batches: int) -> None:
        pass

    def on_epoch(self, row: dict[str, float]) -> None:
        pass


def train(
    config: TrainConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    data_folder: str | os.PathLike[str] | None = None,
    reporter: Any = None,
) -> dict[str, Any]:
    """Train, write ``result.json`` into the folder ``out`` and return its content.

    Args:
        out: the run's folder. It must hold no run, unless ``resume`` is true.
        resume: go on after the last finished epoch; a folder without a run begins one, a run that finished no epoch
            begins again, with a warning, and a finished run is returned as it is. Weights, optimiser, order and
            augmentation are those of a run that was never interrupted, bit for bit if device, number of processes and
            of threads are the same.
        data_folder: see ``wnfused.train.data.load``.
        reporter: a ``wnfused.train.callbacks.Reporter``.

    Under ``torchrun`` every process calls this; the first writes. A process group that exists already is used and kept.

    Raises:
        TypeError: an argument is of another type; UsageError: one cannot work;
        CorruptCheckpointError: ``last.ckpt`` is not whole;
        BackendUnavailableError: the backend that was asked for cannot train this network;
        MissingDependencyError: without Lightning or the data set's library;
        InterruptedRun: Ctrl-C or SIGTERM, a ``KeyboardInterrupt`` that says how to go on.
    """
    began = time.perf_counter()
    if not isinstance(config, TrainConfig):
        raise TypeError(f"config: expected a TrainConfig, got {type(config).__name__}")
    file_path(out=out)
    flag(resume=resume)
    if data_folder is not None:
        file_path(data_folder=data_folder)
    if reporter is not None:
        for name in ("on_batch", "on_epoch"):
            if not callable(getattr(reporter, name, None)):
                raise TypeError(f"reporter: {type(reporter).__name__} has no method {name}")
    require("lightning.pytorch", "training")
    folder = RunFolder(out)
    first = is_first_process()
    going_on = resume and folder.check(config)
    if going_on and folder.finished:
        return folder.read_result()
    if not first:
        if not going_on:  # all processes refuse it, or the others would wait for the first
            folder.refuse_run(resume=resume, trained=True)
        with _on_the_host():
            return _train(config, folder, going_on, data_folder, reporter, began)
    with nullcontext() if going_on else folder.claimed(resume=resume), folder.locked():
        if going_on:
            folder.check_writable()
        else:
            folder.claim(resume=resume)  # nobody else has begun meanwhile
        with _on_the_host():
            return _train(config, folder, going_on, data_folder, reporter, began)


def _on_the_host() -> AbstractContextManager[object]:
    """Where data and order are, whatever the caller's default device is; the network goes where the run is to be. It
    costs every call of torch's, so without such a device there is none of it."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _train(
    config: TrainConfig, folder: RunFolder, going_on: bool, data_folder: str | os.PathLike[str] | None, reporter: Any,
    began: float,
) -> dict[str, Any]:  # fmt: skip
    """The run itself, in a folder that is this process's own."""
    first = is_first_process()
    in_callers_group = _in_process_group()
    checkpoint = folder.checkpoint(config) if going_on else None
    _check_device(config)
    data = load(config.data, config.seed, data_folder)
    _check_cutout(config, data)
    watch = PeakMemory(_device(config))
    model, of_scheme = build_with_remarks(config, data)
    run = _Run(config, data, model, folder, reporter or Silent())
    if first:
        remove_leftovers(*folder.files)
        if not folder.config.exists():
            folder.begin(config, versions())
            for remark in (*config.remarks(), *of_scheme):
                warnings.warn(remark, stacklevel=3)
        elif checkpoint is None:
            warnings.warn(f"no last.ckpt in {folder.path} to go on by: the run there begins again", stacklevel=3)
    try:
        result = run.fit_and_test(checkpoint)
        result["seconds"] = time.perf_counter() - began
        result["peak_memory_bytes"] = watch.peak_bytes()
        result["baseline_memory_bytes"] = watch.baseline_bytes
        result["versions"] = versions()
        result["config"] = config.to_dict()
        if _in_process_group() and not in_callers_group:
            # Its threads, left to the interpreter's end, can abort the process, also of one that cannot write.
            torch.distributed.destroy_process_group()
        if run.trainer.is_global_zero:
            write_json(folder.result, result)
        return result
    except (SystemExit, KeyboardInterrupt) as error:
        stopped_by = signal_of(error)
        if stopped_by is None:
            raise
        raise InterruptedRun(stopped_by, run.where_it_stopped()) from None
    except (UsageError, BackendUnavailableError):
        if first and not going_on:
            folder.abandon()
        raise
    except OSError as error:
        if not first or error.filename is None:
            raise
        # An OSError that knows its file would tell of it last, behind the advice.
        what = f"{error.strerror}: {error.filename!r}"
        raise OSError(error.errno, f"{what}; {run.where_it_stopped()}") from error


@dataclass
class _Run:
    config: TrainConfig
    data: Dataset
    model: nn.Module
    folder: RunFolder
    reporter: Any

    def __post_init__(self) -> None:
        from wnfused.train.callbacks import AtomicCheckpoints, Clock, EpochCheckpoint, Interruptions, Report
        from wnfused.train.module import TrainingModule

        self.clock, self.kept = Clock(), EpochCheckpoint(self.folder.path)
        with _quiet():
            self.trainer = _trainer(
                self.config,
                plugins=[AtomicCheckpoints()],
                callbacks=[self.clock, self.kept, Report(self.reporter), Interruptions()],
                default_root_dir=self.folder.path,
            )
        self.plan = self._plan(len(self.data.train), self.config.batch_size, self.config.accumulate)
        self.module = TrainingModule(self.model, self.config, self.plan.updates)

    def _plan(self, n: int, batch_size: int, accumulate: int = 1) -> Plan:
        return Plan(n, batch_size, accumulate, self.trainer.world_size, self.trainer.global_rank)

    def fit_and_test(self, checkpoint: os.PathLike[str] | None) -> dict[str, Any]:
        from wnfused.train.module import DivergedError

        config = self.config
        augmentation = Augmentation(config.crop_flip, config.cutout, config.mixup)
        batches = TrainBatches(self.data, self.plan, augmentation, config.seed)
        val = EvalBatches(self.data, self.data.val, self._plan(len(self.data.val), _EVAL_BATCH))
        diverged = False
        with _quiet():
            try:
                self.trainer.fit(self.module, batches, val, ckpt_path=checkpoint)
            except DivergedError:
                diverged = True
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):  # torch's batch norm
                    raise
                right = "leaves a mini-batch of one image, too few for batch norm; use another size"
                raise UsageError("batch_size", config.batch_size, right) from None
            result = self._test() if not diverged else _NOTHING_TESTED
        if not diverged and not math.isfinite(result["test_loss"]):
            # The last update overflowed: no training loss came after it to show it.
            diverged, result = True, _NOTHING_TESTED
        return {
            **result,
            "train_loss": None if diverged else self.history[-1]["train_loss"],
            "diverged": diverged,
            "epochs_finished": len(self.history),
            "updates": self.trainer.global_step,
            "seconds_per_step": self.clock.seconds_per_step,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "world_size": self.trainer.world_size,
            "history": [_json_row(row) for row in self.history],
        }

    def where_it_stopped(self) -> str:
        """For someone who stopped it: what is kept, and how to go on."""
        done = self.kept.epochs
        if not done and self.folder.last.exists():  # from before, or written this moment
            done = len(load_checkpoint(self.folder.last)["wnfused"]["history"])
        kept = f"{self.folder.last} is kept" if done else "no epoch was finished, so nothing is kept"
        go_on = f"go on with `wnfused train --out {shlex.quote(str(self.folder.path))} --resume`"
        return f"stopped after {done} of {self.config.epochs} epochs; {kept}; {go_on}"

    @property
    def history(self) -> list[dict[str, float]]:
        return self.module.history

    def _test(self) -> dict[str, Any]:
        from wnfused.train.callbacks import best_epoch

        # Loading best.ckpt replaces the module's history by the shorter one of that epoch.
        history = self.history
        last, best = len(history) - 1, best_epoch(history)
        loss, accuracy = self._tested()
        best_accuracy: float | None = accuracy
        if best != last:
            try:
                best_accuracy = self._tested(self.folder.best)[1]
            except (CorruptCheckpointError, FileNotFoundError) as error:
                warnings.warn(f"best_test_accuracy is left out: {error}", stacklevel=2)
                best_accuracy = None
        self.module.history = history
        return {
            "test_accuracy": accuracy,
            "test_loss": loss,
            "best_epoch": best,
            "best_val_accuracy": history[best]["val_accuracy"],
            "best_test_accuracy": best_accuracy,
        }

    def _tested(self, checkpoint: os.PathLike[str] | None = None) -> tuple[float, float]:
        batches = EvalBatches(self.data, self.data.test, self._plan(len(self.data.test), _EVAL_BATCH))
        self.trainer.test(self.module, batches, ckpt_path=checkpoint, verbose=False)
        return self.module.tested


_NOTHING_TESTED: dict[str, Any] = {
    "test_accuracy": 0.0,
    "test_loss": None,
    "best_epoch": None,
    "best_val_accuracy": None,
    "best_test_accuracy": 0.0,
}


def _json_row(row: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _trainer(config: TrainConfig, **options: Any) -> Any:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    devices: int | str = int(config.devices) if config.devices.isdigit() else 1 if config.cuda_graph else "auto"
    nodes = 1
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun has started the processes; Lightning has to be told of as many.
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    try:
        trainer = lightning.Trainer(
            accelerator=_device(config).type,
            devices=devices,
            num_nodes=nodes,
            strategy=config.strategy,
            precision=cast(Any, config.precision),
            max_epochs=config.epochs,
            accumulate_grad_batches=config.accumulate,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
    except (ValueError, RuntimeError, TypeError, ImportError, MisconfigurationException) as error:
        raise UsageError("strategy", config.strategy, f"cannot be used here: {error}") from error
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        right = "trains in processes that keep their results to themselves; use ddp"
        raise UsageError("strategy", config.strategy, right)
    if trainer.world_size > 1 and not trainer._accelerator_connector.cluster_environment.creates_processes_externally:
        _check_script(config)
    return trainer


def _check_script(config: TrainConfig) -> None:
    """Lightning starts the other processes by the script or the module that runs here."""
    import __main__

    if getattr(__main__, "__spec__", None) is None and not os.path.isfile(sys.argv[0]):
        right = (
            "are processes, each of which runs the script anew, and here is none; put this into a file, or use torchrun"
        )
        raise UsageError("devices", config.devices, right)


def _in_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _device(config: TrainConfig) -> torch.device:
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device", "cuda", "is not available to this installation of torch; cpu is")
    if config.cuda_graph and (_device(config).type != "cuda" or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        raise UsageError("cuda_graph", True, f"needs one CUDA device; this run is on {_device(config)}")
    if config.precision == "16-mixed" and _device(config).type == "cpu":
        # Lightning would take bfloat16 in its place, and the result would say float16.
        raise UsageError("precision", "16-mixed", "is not for the CPU, which this run is on; bf16-mixed is")


def _check_cutout(config: TrainConfig, data: Dataset) -> None:
    _, height, width = data.shape
    # A square of one pixel more covers the image from each of its corners, and so from any centre.
    largest = 2 * max(height, width) - 2
    if config.cutout > largest:
        right = f"leaves nothing of any image of {height} x {width} pixels; use {largest} or less for {data.name}"
        raise UsageError("cutout", config.cutout, right)


def versions() -> dict[str, str]:
    """What a result depends on besides its configuration."""
    import lightning

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "threads": str(torch.get_num_threads()),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's notes on devices, workers and its other products stay out of the output; errors do not."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
