"""``TrainConfig`` as options of a command line: one for each field, with ``-`` for ``_``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from wnfused.train.config import TrainConfig, option_types
from wnfused.train.errors import option


def add_options(parser: argparse.ArgumentParser, *, only: Sequence[str] | None = None) -> None:
    """An option for each field, or for those named. What is not given stays out of the parsed result, so that a
    resumed run can tell what was asked for from what is a default."""
    kinds = option_types()
    for field in fields(TrainConfig):
        if only is None or field.name in only:
            kind, _ = kinds[field.name]
            flag, how = _option(field, kind)
            parser.add_argument(flag, default=argparse.SUPPRESS, **how)


def from_options(given: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """What was given, over ``base`` or the defaults.

    Raises:
        UsageError: if that cannot be run.
    """
    config = TrainConfig.from_dict({**(base.to_dict() if base else {}), **fields_of(given)})
    config.refuse_unused(given)
    return config


def fields_of(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, as values of the configuration's fields."""
    if "init_options" in given:
        return {**given, "init_options": dict(given["init_options"])}
    return given


def _option(field: Field[Any], kind: type) -> tuple[str, dict[str, Any]]:
    """The flag, and how argparse has to treat it."""
    flag, help = option(field.name), field.metadata["help"]
    if kind is dict:
        how = {"dest": field.name, "action": "append", "type": _name_and_value, "metavar": "NAME=VALUE"}
        return flag, {"help": f"{help}; may be repeated", **how}
    if kind is tuple:
        return flag, {"help": help, "type": _epochs, "metavar": "EPOCH,EPOCH..."}
    if kind is bool:
        return flag, {"help": help, "action": argparse.BooleanOptionalAction if field.default else "store_true"}
    if field.default is not None:
        help += f" (default: {field.default})"
    if field.metadata["choices"] is not None:
        return flag, {"help": help, "choices": field.metadata["choices"]}
    return flag, {"help": help, "type": kind, "metavar": kind.__name__.upper()}


def _name_and_value(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE, such as v=he")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value, value)


def _epochs(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be epochs with commas between them, such as 91,136") from None
