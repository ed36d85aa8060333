"""Checkpoint files: whole or refused, and never half written."""

import os
from pathlib import Path

import pytest
import torch

from wnfused.train import checkpoint, files
from wnfused.train.folder import RunFolder

CONTENT = {"weights": torch.arange(1000.0), "epoch": 3, "history": [{"loss": 0.5}]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    checkpoint.save(path, CONTENT)
    return path


def test_round_trip(saved: Path) -> None:
    content = checkpoint.load(saved)
    assert torch.equal(content["weights"], CONTENT["weights"])
    assert content["epoch"] == 3
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_plain_torch_reads_it_too(saved: Path) -> None:
    assert torch.load(saved, weights_only=True)["epoch"] == 3


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1])
def test_a_truncated_file_is_refused(saved: Path, kept: float) -> None:
    whole = saved.read_bytes()
    length = len(whole) + kept if kept < 0 else kept if kept > 1 else len(whole) * kept
    saved.write_bytes(whole[: int(length)])
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"last\.ckpt: is truncated"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    ("others", "right"),
    [
        (["config.json"], "; nothing was changed. Delete it to begin that run again"),
        (["config.json", "best.ckpt"], "; nothing was changed. Delete it and best.ckpt to begin that run again"),
        ([], "; nothing was changed."),
    ],
)
def test_a_run_is_begun_again_only_by_what_is_left(saved: Path, others: list[str], right: str) -> None:
    saved.write_bytes(b"")
    for name in others:
        saved.with_name(name).touch()
    with pytest.raises(checkpoint.CorruptCheckpointError) as refused:
        checkpoint.load(saved)
    assert str(refused.value).endswith(right)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.95])
def test_one_changed_byte_is_noticed(saved: Path, where: float) -> None:
    content = bytearray(saved.read_bytes())
    content[int(where * len(content))] ^= 1
    saved.write_bytes(content)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="SHA-256"):
        checkpoint.load(saved)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def crash(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(saved, {"epoch": 4})
    monkeypatch.undo()
    assert checkpoint.load(saved)["epoch"] == 3
    assert os.listdir(saved.parent) == ["last.ckpt"]


def test_the_content_is_on_disk_before_it_gets_its_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("fsync"), fsync(*a))[1])
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a))[1])
    checkpoint.save(saved, CONTENT)
    assert calls == ["fsync", "replace", "fsync"], "content, name, folder"


def test_leftovers_of_a_killed_writer_are_removed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = saved.parent / ".notes.tmp"
    other.write_bytes(b"someone else's")
    with monkeypatch.context() as killed:
        killed.setattr(os, "unlink", lambda _: None)
        killed.setattr(os, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoint.save(saved, CONTENT)
    assert len(os.listdir(saved.parent)) == 3
    files.remove_leftovers(*RunFolder(saved.parent).files)
    assert sorted(os.listdir(saved.parent)) == [other.name, "last.ckpt"]


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_files_have_ordinary_permissions(saved: Path) -> None:
    ordinary = saved.parent / "ordinary"
    ordinary.touch()
    assert saved.stat().st_mode == ordinary.stat().st_mode
