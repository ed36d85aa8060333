"""Networks that were stored: in a run's folder, in one of its checkpoints, or as a plain ``state_dict``."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wnfused.train import checkpoint
from wnfused.train.config import TrainConfig
from wnfused.train.errors import UsageError
from wnfused.train.folder import RunFolder


def configuration(
    given: dict[str, Any], checkpoints: Sequence[Path]
) -> tuple[TrainConfig, dict[Path, tuple[TrainConfig, dict[str, Tensor]]]]:
    """What all networks have in common, and of each checkpoint its own configuration and the parameters it holds.

    Networks may differ in their schemes, which leave more than parameters: ``half_scaling`` a factor on sums. A plain
    ``state_dict`` does not say which it had; the default is taken.

    Raises:
        UsageError: for a file that is no checkpoint, and for networks that differ.
    """
    read: dict[Path, tuple[TrainConfig | None, dict[str, Tensor]]] = {}
    saved: TrainConfig | None = None
    where: Path | None = None
    for path in checkpoints:
        file, state, content = _read(path)
        of_file = None if content is None else TrainConfig.from_dict(content)
        read[file] = of_file, state
        if of_file is None:
            continue
        if saved is not None and where is not None:
            _same_network(of_file, saved, file, where)
        saved, where = of_file, file
    config = TrainConfig.from_dict({**(saved.to_dict() if saved else {}), **given})
    config.refuse_unused(given)
    if saved is not None and where is not None:
        _same_network(config, saved, "what was asked for", where)
        # The options that were given are those of other schemes than its own.
        config = replace(config, init_options=saved.init_options)
    plain = replace(config, init=TrainConfig.init, init_options={})
    return config, {file: (of_file or plain, state) for file, (of_file, state) in read.items()}


def _same_network(one: TrainConfig, other: TrainConfig, first: object, second: Path) -> None:
    for name in ("model", "depth", "width", "norm", "stack", "data"):
        if getattr(one, name) != getattr(other, name):
            right = f"is of {name} {getattr(other, name)}, but {first} is of {getattr(one, name)}"
            raise UsageError("checkpoint", second, right)


def _read(path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any] | None]:
    """The file, its parameters by name, and the configuration if it is a checkpoint of ``wnfused train``."""
    file = path
    if path.is_dir():
        run = RunFolder(path)
        file = next((f for f in (run.best, run.last) if f.exists()), run.last)
    try:
        content = checkpoint.load(file)
        state = {name.removeprefix("model."): value for name, value in content["state_dict"].items()}
        return file, state, content["wnfused"]["config"]
    except OSError as error:
        raise UsageError("checkpoint", file, f"cannot be read: {error.strerror}") from None
    except (KeyError, TypeError):
        raise UsageError("checkpoint", file, "is not a checkpoint of `wnfused train`") from None
    except checkpoint.CorruptCheckpointError:
        pass  # perhaps a file of torch.save
    neither = "is neither a whole checkpoint of `wnfused train` nor a state_dict"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile):
        raise UsageError("checkpoint", file, neither) from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UsageError("checkpoint", file, neither)
    return file, content, None


def loaded(model: nn.Module, state: dict[str, Tensor], path: Path) -> nn.Module:
    """``model`` with the parameters that ``path`` held; UsageError if they are another model's."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise UsageError("checkpoint", path, f"does not fit the model: {' '.join(lines)[:300]}") from None
    return model
