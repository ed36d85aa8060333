"""From a configuration to an initialised model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from wnfused.dispatch import BackendUnavailableError
from wnfused.train.config import TrainConfig
from wnfused.train.data import Dataset
from wnfused.train.errors import UsageError

# The data-dependent schemes look at this many training images.
SAMPLE = 128

# A note for each layer would be thousands.
_MOST_NOTES = 3


def build(config: TrainConfig, data: Dataset) -> nn.Module:
    """The network of ``config`` for the images of ``data``, initialised by its scheme from its seed.

    Raises:
        UsageError: if the model or the scheme refuses its options.
        BackendUnavailableError: if the backend that was asked for by name cannot make them.
    """
    return build_with_remarks(config, data)[0]


def build_with_remarks(config: TrainConfig, data: Dataset) -> tuple[nn.Module, list[str]]:
    """The same, and what the scheme could not do as its paper has it on this network; a sentence each."""
    from wnfused import init

    torch.manual_seed(config.seed)
    try:
        model = _network(config, data)
    except (ValueError, TypeError) as error:
        raise UsageError("model", config.model, str(error).partition("\n")[0]) from error
    except BackendUnavailableError:
        raise
    except (RuntimeError, MemoryError) as error:  # an allocation that failed, or a size beyond 64 bits
        sizes = [f"--{name} {size}" for name in ("width", "depth") if (size := getattr(config, name)) is not None]
        right = f"there is not enough memory for the network; make {' or '.join(sizes)} smaller"
        raise UsageError("model", config.model, right) from error
    reserved = sorted(config.init_options.keys() & inspect.signature(init.initialize).parameters.keys())
    if reserved:
        given = f"{reserved[0]}={config.init_options[reserved[0]]}"
        raise UsageError("init_options", given, f"is no option of scheme {config.init!r}")
    generator = torch.Generator().manual_seed(config.seed)
    try:
        report = init.initialize(
            model, config.init, sample=sample(data, config.seed), generator=generator, **config.init_options
        )
    except (ValueError, TypeError) as error:
        raise UsageError("init", config.init, str(error)) from error
    remarks = [f"--init {config.init}: {note}" for note in report.notes]
    if len(remarks) > _MOST_NOTES:
        remarks[_MOST_NOTES:] = [f"--init {config.init}: {len(remarks) - _MOST_NOTES} more notes of this kind"]
    return model, remarks


def sample(data: Dataset, seed: int) -> Tensor:
    """Standardised training images for the schemes that look at data, chosen by the seed."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    return data.standardise(data.train.images[order[:SAMPLE]])


def _network(config: TrainConfig, data: Dataset) -> nn.Module:
    from wnfused import models

    channels, height, width = data.shape
    options: dict[str, Any] = {"num_classes": data.classes, "norm": config.norm}
    if config.width is not None:
        options["width"] = config.width
    if config.model == "mlp":
        return models.mlp(config.depth, in_features=channels * height * width, **options)
    if config.model == "cnn":
        return models.cnn(config.depth, in_channels=channels, **options)
    if config.recompute is not None:
        options["recompute"] = config.recompute
    family = {"wrn": models.wrn, "resnet": models.resnet}[config.model]
    return family(config.depth, in_channels=channels, stack=config.stack, **options)
