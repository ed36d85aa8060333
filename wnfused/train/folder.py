"""The folder of a run: what lies in it, and the rule that nothing in it is ever lost by surprise.

| file          | written                                        | holds                                            |
|---------------|------------------------------------------------|--------------------------------------------------|
| `config.json` | when the run begins                            | the configuration and the versions               |
| `last.ckpt`   | at the end of each epoch, after validation     | weights, optimiser, progress, history            |
| `best.ckpt`   | the same, if validation accuracy is the best   | weights                                          |
| `result.json` | when the run ends, diverged or not             | the result                                       |
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wnfused.train import checkpoint
from wnfused.train.config import TrainConfig
from wnfused.train.errors import UsageError
from wnfused.train.files import make_folder, reason, write_json

_IN_EVERY_RESULT = {"test_accuracy", "diverged", "epochs_finished", "seconds_per_step", "peak_memory_bytes"}


class RunFolder:
    """Paths and rules; creates and writes nothing until told to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise UsageError("out", path, "is empty; name a folder")
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.last = self.path / "last.ckpt"
        self.best = self.path / "best.ckpt"
        self.result = self.path / "result.json"

    @property
    def files(self) -> tuple[Path, ...]:
        return self.config, self.last, self.best, self.result

    @property
    def exists(self) -> bool:
        return _exists(self.path)

    @property
    def finished(self) -> bool:
        return self.result.exists()

    def claim(self, *, resume: bool = False) -> None:
        """Make sure of the folder before anything slow is done: it exists, holds no run and can be written.

        Args:
            resume: whether a run here was to go on, and could not.

        Raises:
            UsageError: if it does not.
        """
        self.refuse_run(resume=resume)
        self.check_writable()

    def check_writable(self) -> None:
        """Make sure that files can be written here: an epoch whose checkpoint cannot be is lost.

        Raises:
            UsageError: if not.
        """
        make_folder(self.path)

    def refuse_run(self, *, resume: bool = False, trained: bool = False) -> None:
        """Make sure that no run lies here.

        Args:
            resume: as in ``claim``.
            trained: whether only one that has finished an epoch counts: the first process may be beginning this one.

        Raises:
            UsageError: if one does.
        """
        if any(map(_exists, (self.last, self.best, self.result, *([] if trained else [self.config])))):
            state = "a finished run" if self.finished else "a run"
            going_on = "--resume prints its result" if self.finished else "continue it with --resume"
            right = f"holds {state} already: choose another folder, or {going_on}"
            if resume:
                right = f"holds parts of {state}, neither config.json nor last.ckpt to go on by: choose another folder"
            raise UsageError("out", self.path, right)

    @contextlib.contextmanager
    def claimed(self, *, resume: bool = False) -> Iterator[None]:
        """``claim`` for what is done while this holds; if that fails, a folder that was made for it goes again.

        Raises:
            UsageError: as ``claim``.
        """
        made = not self.exists
        try:
            self.claim(resume=resume)
            yield
        except BaseException:
            if made:
                with contextlib.suppress(OSError, ValueError):  # there is something in it: a run
                    self.path.rmdir()
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While this holds, no other process trains here. The folder exists.

        Raises:
            UsageError: another one does.
        """
        try:
            import fcntl
        except ImportError:  # Windows has none
            yield
            return
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError("out", self.path, "is in use: another process is training there") from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(folder)

    def begin(self, config: TrainConfig, versions: dict[str, str]) -> None:
        """Write down that a run begins here. Not before its arguments are known to work."""
        write_json(self.config, {"config": config.to_dict(), "versions": versions})

    def abandon(self) -> None:
        """Take ``begin`` back where the run turned out to be impossible before it had finished an epoch."""
        if not self.last.exists():
            self.best.unlink(missing_ok=True)
            self.config.unlink(missing_ok=True)

    def saved_config(self) -> TrainConfig | None:
        """The configuration of the run that lies here, from its file or else its checkpoint; None if there is none.

        Raises:
            UsageError: if its file cannot be read.
            CorruptCheckpointError: if the checkpoint that is asked instead is not whole.
        """
        try:
            content = json.loads(self.config.read_text())
            if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
                raise ValueError("it holds no configuration")
            return TrainConfig.from_dict(content["config"])
        except (FileNotFoundError, NotADirectoryError):
            return self._config_of_checkpoint() if self.last.exists() else None
        except (OSError, TypeError, ValueError, RecursionError) as error:
            right = f"cannot be read: {reason(error)}; {self._without_config()}"
            raise UsageError("resume", self.config, right) from None

    def _without_config(self) -> str:
        """What can be done where the configuration's file is of no use."""
        if self.last.exists():
            return "delete it, and --resume goes by the last checkpoint"
        if self.best.exists() or self.result.exists():
            return "there is no last.ckpt to go on by: choose another folder"
        return "delete it, and --resume starts a run"

    def check(self, config: TrainConfig) -> bool:
        """Whether a run lies here that ``config`` continues.

        Raises:
            UsageError: if the run here has another configuration; each difference is named.
        """
        saved = self.saved_config()
        if saved is None:
            return False
        _refuse_differences(config, saved, self.config)
        return True

    def checkpoint(self, config: TrainConfig) -> Path | None:
        """The checkpoint to go on from; None if the run was killed before it finished an epoch.

        Raises:
            UsageError: if the checkpoint has another configuration, or is gone while epochs were finished.
            CorruptCheckpointError: if it is not whole.
        """
        if not self.last.exists():
            if self._lost_epochs():
                right = "holds best.ckpt, but no last.ckpt to go on by: put that back, or choose another folder, or "
                raise UsageError("resume", self.path, right + "delete best.ckpt to begin the run again")
            return None
        _refuse_differences(config, self._config_of_checkpoint(), self.last)
        return self.last

    def _lost_epochs(self) -> bool:
        """Whether ``best.ckpt`` tells of a ``last.ckpt`` that is gone. The first epoch's need not: a process killed
        between the two files leaves it alone, and to begin again loses nothing but that epoch."""
        try:
            return len(checkpoint.load(self.best)["wnfused"]["history"]) > 1
        except FileNotFoundError:
            return False
        except (checkpoint.CorruptCheckpointError, KeyError):  # no process that was killed leaves such a file
            return True

    def _config_of_checkpoint(self) -> TrainConfig:
        content = checkpoint.load(self.last)
        if "wnfused" not in content:
            raise checkpoint.CorruptCheckpointError(self.last, "is not a checkpoint of `wnfused train`")
        return TrainConfig.from_dict(content["wnfused"]["config"])

    def read_result(self) -> dict[str, Any]:
        """What a finished run left.

        Raises:
            UsageError: if its file is not whole.
        """
        right = "delete it, and --resume tests the last checkpoint again"
        if not self.last.exists():
            files = "it and best.ckpt" if self.best.exists() else "it"
            right = f"delete {files}, and --resume trains again from the start"
        try:
            result = json.loads(self.result.read_text())
        except (OSError, ValueError) as error:
            raise UsageError("resume", self.result, f"cannot be read: {reason(error)}; {right}") from None
        if not isinstance(result, dict) or not result.keys() >= _IN_EVERY_RESULT:
            raise UsageError("resume", self.result, f"is no result of `wnfused train`; {right}")
        return result


def _exists(file: Path) -> bool:
    """Whether there is one; a name that is no file's will be told of when the folder is made."""
    try:
        return file.exists()
    except (OSError, ValueError):
        return False


def _refuse_differences(asked: TrainConfig, saved: TrainConfig, where: Path) -> None:
    differences = asked.differences(saved)
    if differences:
        rule = "a run goes on as it was begun, another one needs another folder"
        right = f"is of another configuration; asked for {'; '.join(differences)}: {rule}"
        raise UsageError("resume", where, right)
