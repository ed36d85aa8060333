"""The rules of a run's folder, and resuming what was interrupted."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, assert_same_weights

from wnfused.train import UsageError, checkpoint, train
from wnfused.train.interruption import InterruptedRun
from wnfused.train.launch import is_first_process
from wnfused.train.run import Silent

pytestmark = pytest.mark.usefixtures("one_thread_throughout")


class Interrupted(Exception):
    pass


class Interrupt(Silent):
    """A reporter that ends the process's run in the middle of epoch ``epoch``."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_batch(self, epoch: int, done: int, batches: int) -> None:
        if epoch == self.epoch and done == batches // 2:
            raise Interrupted


def test_a_finished_run_is_not_touched(finished: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(UsageError, match="holds a finished run already"):
        train(SMALL, out)
    assert train(SMALL, out, resume=True) == json.loads(json.dumps(result))
    with pytest.raises(UsageError, match=r"lr: 0\.5, not 0\.02"):
        train(replace(SMALL, lr=0.5), out, resume=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, epoch: int
) -> None:
    out, result = finished
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path, reporter=Interrupt(epoch))
    assert (tmp_path / "last.ckpt").exists() == (epoch > 0)
    with pytest.raises(UsageError, match="holds a run already"):
        train(SMALL, tmp_path)
    with pytest.warns(UserWarning, match="begins again") if epoch == 0 else nullcontext():
        resumed = train(SMALL, tmp_path, resume=True)
    assert_same_weights(out, tmp_path)
    for name in ("test_accuracy", "test_loss", "history", "updates", "best_epoch", "best_test_accuracy"):
        assert resumed[name] == result[name], name


def test_a_run_with_only_its_tests_left_keeps_the_time_of_a_step(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = finished
    for name in ("config.json", "last.ckpt", "best.ckpt"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    assert train(SMALL, tmp_path, resume=True)["seconds_per_step"] == result["seconds_per_step"] > 0


def test_resuming_augmented_training_with_batch_norm_and_steps_is_exact(tmp_path: Path) -> None:
    config = replace(
        SMALL, data="synthetic", norm="batch", epochs=3, batch_size=100, accumulate=2, warmup=1.5, milestones=(2,),
        crop_flip=True, cutout=4, mixup=0.5, weight_decay=1e-3,
    )  # fmt: skip
    train(config, tmp_path / "whole")
    for epoch in (1, 2):
        with pytest.raises(Interrupted):
            train(config, tmp_path / "parts", resume=epoch > 1, reporter=Interrupt(epoch))
    train(config, tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_resuming_a_folder_without_a_run_begins_one(tmp_path: Path) -> None:
    assert train(replace(SMALL, epochs=1), tmp_path / "new", resume=True)["epochs_finished"] == 1


def test_a_run_without_its_configuration_goes_on_by_its_checkpoint(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path, reporter=Interrupt(1))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match=r"lr: 0\.5, not 0\.02"):
        train(replace(SMALL, lr=0.5), tmp_path, resume=True)
    train(SMALL, tmp_path, resume=True)
    assert_same_weights(finished[0], tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["config"] == SMALL.to_dict()


def test_parts_of_a_run_with_nothing_to_go_on_by_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "best.ckpt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"neither config\.json nor last\.ckpt to go on by: choose another folder"):
        train(SMALL, tmp_path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_whose_last_checkpoint_is_gone_does_not_begin_again_over_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr("wnfused.train.callbacks.best_epoch", lambda history: len(history) - 1)
    train(SMALL, tmp_path)
    for name in ("last.ckpt", "result.json"):
        (tmp_path / name).unlink()
    if not whole:
        (tmp_path / "best.ckpt").write_bytes(b"cut off")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"no last\.ckpt to go on by: .* or delete best\.ckpt to begin the run again$"):
        train(SMALL, tmp_path, resume=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_run_that_finished_no_epoch_says_that_it_begins_again(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Killed between the two files of its first epoch."""
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path, reporter=Interrupt(1))
    (tmp_path / "last.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"no last\.ckpt in .* to go on by: the run there begins again"):
        train(SMALL, tmp_path, resume=True)
    assert_same_weights(finished[0], tmp_path)


@pytest.mark.parametrize(
    ("others", "right"),
    [
        ([], "delete it, and --resume starts a run"),
        (["best.ckpt"], r"there is no last\.ckpt to go on by: choose another folder"),
        (["result.json"], r"there is no last\.ckpt to go on by: choose another folder"),
        (["best.ckpt", "last.ckpt"], "delete it, and --resume goes by the last checkpoint"),
    ],
)
def test_a_broken_configuration_says_what_leads_on(tmp_path: Path, others: list[str], right: str) -> None:
    for name in ("config.json", *others):
        (tmp_path / name).write_text("{")
    with pytest.raises(UsageError, match=rf"config\.json: cannot be read: .*; {right}$"):
        train(SMALL, tmp_path, resume=True)


@pytest.mark.parametrize(("others", "files"), [([], "it"), (["best.ckpt"], r"it and best\.ckpt")])
def test_a_broken_result_without_a_checkpoint_says_what_leads_on(tmp_path: Path, others: list[str], files: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": SMALL.to_dict()}))
    for name in ("result.json", *others):
        (tmp_path / name).write_text("{}")
    right = rf"result\.json: .*; delete {files}, and --resume trains again from the start"
    with pytest.raises(UsageError, match=right):
        train(SMALL, tmp_path, resume=True)


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign"])
def test_a_corrupt_checkpoint_is_refused_and_nothing_is_lost(tmp_path: Path, damage: str) -> None:
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path, reporter=Interrupt(1))
    last = tmp_path / "last.ckpt"
    if damage == "truncated":
        last.write_bytes(last.read_bytes()[:-1000])
    elif damage == "changed":
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 255
        last.write_bytes(content)
    else:
        checkpoint.save(last, {"something": "else"})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"last\.ckpt"):
        train(SMALL, tmp_path, resume=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    for name, config in (("one", SMALL), ("other", replace(SMALL, depth=22))):
        with pytest.raises(Interrupted):
            train(config, tmp_path / name, reporter=Interrupt(1))
    (tmp_path / "other" / "last.ckpt").replace(tmp_path / "one" / "last.ckpt")
    with pytest.raises(UsageError, match=r"last\.ckpt.*depth: 16, not 22"):
        train(SMALL, tmp_path / "one", resume=True)


def test_nothing_is_begun_before_the_arguments_are_known_to_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--init"):
        train(replace(SMALL, init="nonsense"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    refused = []

    class Second(Silent):
        """Begins another run in the middle of the first, by another file handle, as another process would."""

        def on_batch(self, epoch: int, done: int, batches: int) -> None:
            with pytest.raises(UsageError, match="is in use: another process is training there"):
                train(SMALL, tmp_path, resume=True)
            refused.append(epoch)
            raise Interrupted

    with pytest.raises(Interrupted):
        train(SMALL, tmp_path, reporter=Second())
    assert refused == [0]
    with pytest.warns(UserWarning, match="begins again"):
        train(SMALL, tmp_path, resume=True)


@pytest.mark.parametrize("epochs", [0, 1])
def test_what_is_said_to_be_kept_is_what_the_checkpoint_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    """Stopped while an epoch's checkpoint is written."""

    def save(path: Path, content: dict[str, Any]) -> None:
        if Path(path).name == "last.ckpt" and len(content["wnfused"]["history"]) > epochs:
            raise KeyboardInterrupt
        checkpoint.save(path, content)

    monkeypatch.setattr("wnfused.train.callbacks.save", save)
    with pytest.raises(InterruptedRun, match=f"stopped after {epochs} of {SMALL.epochs} epochs"):
        train(SMALL, tmp_path)
    assert (tmp_path / "last.ckpt").exists() == (epochs > 0)


def test_a_run_without_its_best_checkpoint_can_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wnfused.train.callbacks.best_epoch", lambda history: 0)
    expected = train(SMALL, tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "best.ckpt").write_bytes(b"cut off")
    with pytest.warns(UserWarning, match=r"best_test_accuracy is left out: checkpoint .*best\.ckpt: is truncated"):
        result = train(SMALL, tmp_path, resume=True)
    assert result["best_test_accuracy"] is None
    assert result["test_accuracy"] == expected["test_accuracy"]


def test_a_run_does_not_go_on_in_a_folder_that_became_read_only(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "last.ckpt", "best.ckpt"):
        (tmp_path / name).write_bytes((finished[0] / name).read_bytes())

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("wnfused.train.files.tempfile.TemporaryFile", refuse)
    with pytest.raises(UsageError, match=rf"--out {tmp_path}: cannot be written: Permission denied"):
        train(SMALL, tmp_path, resume=True)
    assert train(SMALL, finished[0], resume=True) == json.loads(json.dumps(finished[1])), "its result can be read"


@pytest.mark.parametrize("out", ["", "x" * 300, "a\0b"])
def test_a_folder_that_cannot_be_is_named(out: str) -> None:
    with pytest.raises(UsageError, match="--out"):
        train(SMALL, out)


def test_every_process_refuses_a_folder_that_is_taken(
    finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="holds a finished run already"):
        train(SMALL, finished[0])


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_NAME": "train"}, False),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}, True),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_NAME": "bash"}, True),
    ],
)
def test_who_is_first(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first: bool) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() is first
