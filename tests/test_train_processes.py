"""Runs in processes of their own: killed without warning, and two at once under torchrun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wnfused
from wnfused.train import checkpoint

COMMAND = ["-m", "wnfused", "train", "--depth", "16", "--lr", "0.02", "--epochs", "3", "--batch-size", "50"]
# One thread: the runs are compared bit for bit, and share two cores with other tests.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, launcher: tuple[str, ...] = (), status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, *COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == status, done.stderr
    return done


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--out", str(out))
    assert done.stderr == "", "Lightning and the warnings of others keep quiet"
    return out


def test_killed_and_resumed_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, *COMMAND, "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 1/3"):
                # In the second epoch: the line is printed when the first one's checkpoint is complete.
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert not (out / "result.json").exists()
    assert checkpoint.load(out / "last.ckpt")["epoch"] == 0
    done = run("--out", str(out), "--resume")
    assert "epoch 1/3" not in done.stdout
    one, other = (checkpoint.load(folder / "last.ckpt") for folder in (whole, out))
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name
    assert result(out)["history"] == result(whole)["history"]
    assert result(out)["test_accuracy"] == result(whole)["test_accuracy"]


def test_two_processes_train_as_one(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run("--out", str(out), launcher=launcher)
    assert done.stdout.count("epoch 1/3") == 1, "the first process speaks for both"
    one, two = result(whole), result(out)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert two["updates"] == one["updates"]
    # 1293 = 25 * 50 + 43: the last batch is odd, one process's part of it is padded. What differs is the order of
    # float32 sums; that grows over the updates, so the first epoch is compared closely.
    assert two["history"][0]["train_loss"] == pytest.approx(one["history"][0]["train_loss"], rel=1e-3)
    assert two["history"][0]["val_loss"] == pytest.approx(one["history"][0]["val_loss"], rel=1e-2)
    a, b = (checkpoint.load(folder / "last.ckpt")["state_dict"] for folder in (whole, out))
    distance = sum((a[n] - b[n]).square().sum() for n in a) / sum(a[n].square().sum() for n in a)
    assert distance.sqrt() < 2e-2


def test_two_processes_of_a_command_that_is_no_script_are_refused(tmp_path: Path) -> None:
    text = "from wnfused.train import *; train(TrainConfig(depth=10, data='synthetic', devices='2'), 'run')"
    for arguments, given in ((["-c", text], ""), (["-"], text)):
        done = subprocess.run(
            [sys.executable, *arguments], input=given, cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env={**ENVIRONMENT, "PYTHONPATH": str(Path(wnfused.__file__).parents[1])},
        )  # fmt: skip
        assert "UsageError: --devices 2: are processes, each of which runs the script anew" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_divergence_under_torchrun_ends_all_processes_cleanly(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run("--out", str(tmp_path / "two"), "--lr", "1e20", launcher=launcher, status=1)
    assert "diverged in epoch 1" in done.stdout
    assert result(tmp_path / "two")["diverged"]
