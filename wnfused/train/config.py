"""Everything that determines a training run, and the check that it can be run."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from wnfused._numbers import plain_number
from wnfused.init import schemes
from wnfused.models._common import RESIDUAL_NORMS
from wnfused.models.resnet import depth_error
from wnfused.train.data import names
from wnfused.train.errors import UsageError

MODELS = ("wrn", "resnet", "cnn", "mlp")
PRECISIONS = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
RESIDUAL = ("wrn", "resnet")

_LARGEST = 38  # decimal exponent of what float32 holds


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field that brings along what the command line says about it."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class TrainConfig:
    """One run. The command line's options are these fields, with ``-`` for ``_``.

    Raises:
        UsageError: for a value that cannot work, whatever the data and the model are.
    """

    model: str = _option("wrn", "the network", MODELS)
    depth: int = _option(40, "its layers: 6N+4 for wrn, 6N+2 for resnet, hidden layers for mlp, convolutions for cnn")
    width: int | None = _option(
        None,
        "wrn, resnet: channels of the first stage over 16; mlp, cnn: units or channels; default: the model's",
    )
    norm: str = _option("weight", "of the layers; fixup: its scalars, in wrn and resnet, for zhang2019", RESIDUAL_NORMS)
    stack: bool = _option(True, "run the blocks of a stage as one op")
    recompute: int | None = _option(
        None,
        "recompute the activations of a stage in the backward pass, keeping those of every this many blocks",
    )
    data: str = _option("digits", "digits, mnist, cifar10, cifar100 or synthetic")
    init: str = _option("arpit2019", "initialisation scheme; `wnfused info` lists them")
    init_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "an option of the scheme; `wnfused info` lists them"}
    )
    epochs: int = _option(4, "passes over the training split")
    batch_size: int = _option(64, "images of a mini-batch, over all processes together")
    accumulate: int = _option(1, "mini-batches whose gradients make one update")
    lr: float = _option(0.01, "learning rate")
    momentum: float = _option(0.9, "momentum of SGD (not Nesterov's)")
    weight_decay: float = _option(0.0, "weight decay, on all parameters")
    warmup: float = _option(0.0, "epochs of the quadratic warm-up")
    milestones: tuple[int, ...] = _option((), "epochs, counted from 0, from which the rate is multiplied by the factor")
    factor: float = _option(0.1, "what a milestone multiplies the rate by")
    crop_flip: bool = _option(False, "augment by random crops (4 pixels of padding) and mirror images")
    cutout: int = _option(0, "augment by cutting out a square of this many pixels")
    mixup: float = _option(0.0, "augment by mixing pairs of images, with shares from Beta(mixup, mixup)")
    seed: int = _option(0, "of the weights, the validation split, the order and the augmentation")
    cuda_graph: bool = _option(False, "record the network as CUDA graphs and replay them; one CUDA device")
    precision: str = _option("32-true", "as Lightning names them; 16-mixed for CUDA alone", PRECISIONS)
    device: str = _option("auto", "cpu, cuda or auto")
    devices: str = _option("auto", "how many, or auto; under torchrun its processes")
    strategy: str = _option("auto", "Lightning's: auto, ddp, fsdp ...")

    def __post_init__(self) -> None:
        self._take_other_numbers()
        self._check_types()
        for name, choices in (("model", MODELS), ("norm", RESIDUAL_NORMS), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise UsageError(name, getattr(self, name), f"must be one of {', '.join(choices)}")
        self._check_names()
        for name, least in (("depth", 1), ("width", 1), ("recompute", 1), ("epochs", 1), ("batch_size", 1)):
            self._at_least(name, least)
        for name, least in (("accumulate", 1), ("cutout", 0), ("seed", 0)):
            self._at_least(name, least)
        for name in ("depth", "width", "recompute", "epochs", "batch_size", "accumulate", "cutout"):
            if (getattr(self, name) or 0) >= 2**31:
                raise UsageError(name, getattr(self, name), "must be below 2**31")
        if self.seed >= 2**63:
            raise UsageError("seed", self.seed, "must be below 2**63, what torch's generators take")
        if not 0 <= self.momentum < 1:
            raise UsageError("momentum", self.momentum, "must be 0 or more and below 1")
        for name in ("weight_decay", "warmup", "mixup"):
            self._finite(name, positive=False)
        for name in ("lr", "factor"):
            self._finite(name, positive=True)
        if any(not isinstance(m, int) or isinstance(m, bool) or not 0 <= m < 2**31 for m in self.milestones):
            raise UsageError("milestones", self.milestones, "must be epochs, counted from 0, below 2**31")
        if math.log10(self.lr) + len(self.milestones) * math.log10(self.factor) > _LARGEST:
            raise UsageError("factor", self.factor, f"makes rates above 1e{_LARGEST} of lr {self.lr}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError("device", self.device, "must be cpu, cuda or auto")
        if self.devices != "auto" and not (
            self.devices.isascii() and self.devices.isdecimal() and 0 < int(self.devices) < 2**31
        ):
            raise UsageError("devices", self.devices, "must be a number of devices or auto")
        if self.cuda_graph and (self.device == "cpu" or self.devices not in ("auto", "1")):
            raise UsageError("cuda_graph", True, "needs one CUDA device: device cuda, devices 1")
        self.refuse_unused([f.name for f in fields(self) if getattr(self, f.name) != f.default])
        if self.recompute is not None and not self.stack:
            raise UsageError("recompute", self.recompute, "is for stacked blocks; leave --no-stack out")
        if self.norm == "fixup" and self.model not in RESIDUAL:
            raise UsageError("norm", self.norm, "is for the residual blocks of wrn and resnet")
        wrong = depth_error(self.model, self.depth) if self.model in RESIDUAL else None
        if wrong is not None:
            raise UsageError("depth", self.depth, wrong)

    def refuse_unused(self, given: Collection[str]) -> None:
        """Of what was asked for by name, at its default or not, what this network has no use for.

        Raises:
            UsageError: for the first such.
        """
        if self.model in RESIDUAL and self.norm == "weight":
            return
        for name in ("stack", "recompute"):
            if name in given and getattr(self, name) is not None:
                raise UsageError(name, getattr(self, name), "is for the weight-normalised stages of wrn and resnet")

    def _take_other_numbers(self) -> None:
        """numpy's, say, as Python's own, which JSON has a form for."""
        for name in option_types():
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = tuple(map(plain_number, value))
            elif isinstance(value, dict):
                value = {option: plain_number(of_option) for option, of_option in value.items()}
            object.__setattr__(self, name, plain_number(value))

    def _check_types(self) -> None:
        """argparse has seen to it for the command line; not so for Python, and for files that were edited by hand."""
        for name, (kind, optional) in option_types().items():
            value = getattr(self, name)
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not (fits and isinstance(value, bool) == (kind is bool)) and not (optional and value is None):
                right = f"must be of type {kind.__name__}{' or None' if optional else ''}, not {type(value).__name__}"
                raise UsageError(name, value, right)

    def _check_names(self) -> None:
        if self.data not in names():
            raise UsageError("data", self.data, f"is not a data set; there are {', '.join(names())}")
        if self.init not in schemes():
            raise UsageError("init", self.init, f"is not a scheme; there are {', '.join(schemes())}")
        for option, value in self.init_options.items():
            if not isinstance(option, str) or not (value is None or isinstance(value, (bool, int, float, str))):
                right = "must be options by name, each a number, a string, True, False or None"
                raise UsageError("init_options", self.init_options, right)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise UsageError(name, value, f"must be {least} or more")

    def _finite(self, name: str, positive: bool) -> None:
        value = getattr(self, name)
        if not 0 <= value <= 10**_LARGEST or (positive and value == 0):
            least = "above 0" if positive else "0 or more"
            raise UsageError(name, value, f"must be a finite number, {least}, of at most 1e{_LARGEST}")

    def remarks(self) -> list[str]:
        """What can be run, but hardly does what was meant; a sentence each."""
        remarks = []
        if self.norm == "fixup" and self.init != "zhang2019":
            remarks.append(f"--norm fixup: its blocks are meant for --init zhang2019, not {self.init}")
        if self.crop_flip and self.data == "digits":
            remarks.append("--crop-flip: shifts by up to four pixels and mirrors, which leaves little of a digit")
        if self.warmup > self.epochs:
            remarks.append(f"--warmup {self.warmup:g}: the run ends before, by --epochs {self.epochs}")
        late = [m for m in self.milestones if m >= self.epochs]
        if late:
            never = ",".join(map(str, late))
            remarks.append(f"--milestones {never}: never reached, the last epoch is {self.epochs - 1}")
        return remarks

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; ``from_dict`` undoes it."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrainConfig:
        """The configuration that ``to_dict`` or a command line gave; names it does not know are an error.

        Raises:
            TypeError: for no dict; UsageError: for a name or a value that cannot work.
        """
        if not isinstance(content, dict):
            raise TypeError(f"content: expected a dict, got {type(content).__name__}")
        known = {f.name for f in fields(cls)}
        for name in content:
            if name not in known:
                raise UsageError(name, content[name], "is not an option of this version")
        fitting: dict[str, Any] = {
            name: tuple(v) if name == "milestones" and isinstance(v, list) else v for name, v in content.items()
        }
        return cls(**fitting)

    def differences(self, other: TrainConfig) -> list[str]:
        """How this configuration differs from ``other``: lines such as ``depth: 100, not 40``."""
        mine, others = self.to_dict(), other.to_dict()
        return [f"{name}: {mine[name]}, not {others[name]}" for name in mine if mine[name] != others[name]]


def option_types() -> dict[str, tuple[type, bool]]:
    """For every field: the type of one value, and whether it may be None. The command line is built from this."""
    result = {}
    for name, hint in typing.get_type_hints(TrainConfig).items():
        optional = isinstance(hint, types.UnionType)
        kind = next(a for a in typing.get_args(hint) if a is not type(None)) if optional else hint
        result[name] = (typing.get_origin(kind) or kind, optional)
    return result
