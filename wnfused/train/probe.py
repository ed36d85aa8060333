"""``wnfused probe``: the measurements of ``wnfused.diagnostics`` on a built-in network, as an initialisation leaves it
or as a checkpoint holds it. Each writes a picture, the same numbers as JSON, and a table.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wnfused
from wnfused.diagnostics import NormProfile
from wnfused.diagnostics.drawing import Drawable, checked_path, save_together
from wnfused.optional import require
from wnfused.train.build import build, build_with_remarks
from wnfused.train.config import TrainConfig
from wnfused.train.data import Dataset, load
from wnfused.train.errors import UsageError
from wnfused.train.files import make_folder, reason, write_json
from wnfused.train.folder import RunFolder
from wnfused.train.measurements import MEASUREMENTS, Measurement
from wnfused.train.stored import configuration, loaded

_IN_EVERY_PROBE = {"what", "results"}

# So many rows are read at a glance; picture and JSON have them all.
_ROWS = 12


def measure(model: nn.Module, data: Dataset, samples: int) -> NormProfile:
    """Norms on the first ``samples`` training images, in float64, where even an exploding network stays finite."""
    profile = _run(MEASUREMENTS["norms"], model, *_images(data, samples), progress=False)
    assert isinstance(profile, NormProfile)
    return profile


def probe(
    given: dict[str, Any],
    *,
    what: Sequence[str] = ("norms",),
    inits: Sequence[str] = (),
    checkpoints: Sequence[Path] = (),
    samples: int | None = None,
    out: Path = Path("probe.png"),
    folder: Path | None = None,
) -> str:
    """Measure one network for each of ``inits`` and ``checkpoints``; write pictures and JSON; the tables.

    Args:
        given: fields of ``TrainConfig`` that were asked for; the rest is the checkpoints', or the defaults. Of the
            options of a scheme each checkpoint has its own, and ``inits`` have those given here.
        what: names of ``MEASUREMENTS``.
        inits: schemes; ``arpit2019`` if neither these nor checkpoints are given.
        checkpoints: run folders or checkpoints of ``wnfused train``, or files with the ``state_dict`` of a model that
            ``given`` describes.
        samples: training images to measure on; default: the measurement's own.
        out: the picture; with several ``what``, their names go before its ending. JSON goes beside it, over that of an
            earlier probe alone.

    Raises:
        UsageError: for an argument that cannot work.
    """
    require("matplotlib", "wnfused probe")
    if samples is not None and samples < 1:
        raise UsageError("samples", samples, "must be 1 or more")
    what = list(dict.fromkeys(what))
    for name in what:
        if name not in MEASUREMENTS:
            raise UsageError("what", name, f"is no measurement; there are {', '.join(MEASUREMENTS)}")
    outs = _outs(out, what)
    config, stored = configuration(given, checkpoints)
    options = given.get("init_options", {})
    if not inits and not stored:
        inits = ("arpit2019",)
    elif not inits and options:
        option, value = next(iter(options.items()))
        raise UsageError("init_options", f"{option}={value}", "is for the schemes of --init, and none is named")
    data = load(config.data, config.seed, folder)
    models: dict[str, nn.Module] = {}
    for init in dict.fromkeys(inits):
        models[init], remarks = build_with_remarks(replace(config, init=init, init_options=options), data)
        for remark in remarks:
            warnings.warn(remark, stacklevel=2)
    for path, (of_file, state) in stored.items():
        models[str(path)] = loaded(build(of_file, data), state, path)
    texts = [_one(name, models, config, data, samples, outs[name], bool(stored)) for name in what]
    return "\n\n".join(texts)


def _one(
    name: str, models: dict[str, nn.Module], config: TrainConfig, data: Dataset, samples: int | None, out: Path,
    trained: bool,
) -> str:  # fmt: skip
    measurement = MEASUREMENTS[name]
    images, labels = _images(data, measurement.samples if samples is None else samples)
    results: dict[str, Drawable] = {}
    for label, model in models.items():
        try:
            results[label] = _run(measurement, model, images, labels, progress=sys.stdout.isatty())
        except ValueError as error:
            if "more than 1 value per channel" in str(error):  # torch's batch norm
                right = "is too few for batch norm, which needs two values of each channel; use 2 or more"
                raise UsageError("samples", len(images), right) from None
            if len(images) == 1:
                raise UsageError("samples", 1, f"is too few for {name}: {error}") from None
            raise UsageError("what", name, f"cannot be measured: {error}") from error
    before = "" if trained else ", before training"
    norm = {"weight": "weight-normalised ", "batch": "batch-normalised ", "none": "", "fixup": "Fixup "}[config.norm]
    title = f"{measurement.title}\n{norm}{config.model}, {config.depth:,} layers, {config.data}{before}"
    try:
        save_together(results, out, title=title, legend_title="initialisation" if before else None)
        content = {label: result.as_json() for label, result in results.items()}
        facts = {"what": name, "samples": len(images), "config": config.to_dict(), "torch": torch.__version__}
        write_json(out.with_suffix(".json"), {**facts, "results": content})
    except OSError as error:
        raise UsageError("out", out, f"cannot be written: {error.strerror}") from None
    files = f"-> {out}, {out.with_suffix('.json')}"
    return f"{measurement.title}, {len(images)} images\n{_table(measurement, results)}\n{files}"


def _run(measurement: Measurement, model: nn.Module, images: Tensor, labels: Tensor, *, progress: bool) -> Drawable:
    # The reference has every dtype; the kernels need not.
    with wnfused.use_backend("reference"):
        dtype = torch.float64 if measurement.double else torch.float32
        model, images = copy.deepcopy(model).to(dtype), images.to(dtype)
        if measurement.independent:
            _settle_batch_norm(model, images)
        return measurement.measure(model, images, labels, progress)


def _settle_batch_norm(model: nn.Module, images: Tensor) -> None:
    """Eval mode, with these images' statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model(images)
    model.eval()


def _images(data: Dataset, samples: int) -> tuple[Tensor, Tensor]:
    return data.standardise(data.train.images[:samples]), data.train.labels[:samples]


def _outs(out: Path, what: Sequence[str]) -> dict[str, Path]:
    """Where each picture goes; found out to be writable before anything slow is done."""
    try:
        checked_path(out)
    except ValueError as error:
        raise UsageError("out", out, f"is {str(error).partition(' is ')[2]}") from None
    if out.is_dir():
        raise UsageError("out", out, "is a folder; give the name of a picture")
    make_folder(out.parent, out)
    outs = {name: out.with_stem(f"{out.stem}-{name}") if len(what) > 1 else out for name in what}
    for picture in outs.values():
        _check_numbers(out, picture.with_suffix(".json"))
    return outs


def _check_numbers(out: Path, numbers: Path) -> None:
    """The JSON beside a picture is no file of a run, nor anything else that another program wrote."""
    if numbers.name.lower() in (file.name for file in RunFolder(numbers.parent).files):
        raise UsageError("out", out, f"has its numbers in {numbers.name}, which is a run's file; choose another name")
    try:
        content = json.loads(numbers.read_text())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError("out", out, f"cannot be written: {numbers.name}: {reason(error)}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not content.keys() >= _IN_EVERY_PROBE:
        right = f"would overwrite {numbers}, which `wnfused probe` did not write; choose another name"
        raise UsageError("out", out, right)


# -------------------------------------------------------------------------------------------------------- table


def _table(measurement: Measurement, results: dict[str, Drawable]) -> str:
    """A row for each of a few stations and a column for each measurement, or a row for each single result."""
    first = next(iter(results.values()))
    names = getattr(first, "names", None)
    if names is None or not len(names):
        header = ["", *measurement.columns]
        rows = [
            [label, *(_number(np.mean(getattr(result, field))) for field in measurement.columns.values())]
            for label, result in results.items()
        ]
        return _aligned([header, *rows])
    stations = sorted({round(i * (len(names) - 1) / (_ROWS - 1)) for i in range(_ROWS)})
    labels = ["", *(cell for label in results for cell in [label, *[""] * (len(measurement.columns) - 1)])]
    heads = ["", *(heading for _ in results for heading in measurement.columns)]
    rows = [
        [names[i], *(_value(result, field, i) for result in results.values() for field in measurement.columns.values())]
        for i in stations
    ]
    return _aligned([labels, heads, *rows])


def _value(result: Drawable, field: str, station: int) -> str:
    return _number(np.mean(getattr(result, field)[station]))


def _number(value: Any) -> str:
    return f"{value:.4g}"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
