"""wnfused: fused weight-normalised layers and very deep weight-normalised residual networks for PyTorch.

wnfused.WNLinear, wnfused.WNConv2d               drop-in layers, initialised to train at any depth
wnfused.WNResidualBlock, WNResidualStage         a residual stage as one layer
wnfused.models                                   mlp, cnn, resnet, wrn
wnfused.functional                               the ops as functions of tensors
wnfused.init                                     schemes by name, for a layer or a whole model
wnfused.regularize                               orthogonal penalties, retractions and proxies
wnfused.convert, wnfused.fold                    in from torch's weight norm, out to plain layers
wnfused.state_dict_to_torch, ..._from_torch      checkpoints in torch's forms
wnfused.param_groups                             weights that an optimiser decays, gains and biases that it does not
wnfused.use_backend, wnfused.backend_status      which kernels run, and why
wnfused.frozen                                   inference: weights do not change and are packed once
wnfused.diagnostics, wnfused.train               what the papers measure; the training command
wnfused.empty_cache                              gives back CPU memory that is kept for the next step
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from wnfused import functional, init, models, nn, regularize
from wnfused.checkpoints import state_dict_from_torch, state_dict_to_torch
from wnfused.convert import convert
from wnfused.dispatch import BackendUnavailableError, BackendWarning, backend_status, use_backend
from wnfused.fold import fold
from wnfused.frozen import frozen
from wnfused.memory import empty_cache
from wnfused.nn import (
    WNConv1d,
    WNConv2d,
    WNConv3d,
    WNConvTranspose1d,
    WNConvTranspose2d,
    WNConvTranspose3d,
    WNLinear,
    WNResidualBlock,
    WNResidualStage,
)
from wnfused.parameter_groups import param_groups

try:
    __version__ = version("wnfused")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_WHEN_ASKED_FOR = ("diagnostics", "train")


def __getattr__(name: str) -> ModuleType:
    """Subpackages that layers do without, imported when they are first used."""
    if name in _WHEN_ASKED_FOR:
        return import_module(f"wnfused.{name}")
    raise AttributeError(f"module 'wnfused' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_ASKED_FOR})


__all__ = [
    "BackendUnavailableError",
    "BackendWarning",
    "WNConv1d",
    "WNConv2d",
    "WNConv3d",
    "WNConvTranspose1d",
    "WNConvTranspose2d",
    "WNConvTranspose3d",
    "WNLinear",
    "WNResidualBlock",
    "WNResidualStage",
    "__version__",
    "backend_status",
    "convert",
    "empty_cache",
    "fold",
    "frozen",
    "functional",
    "init",
    "models",
    "nn",
    "param_groups",
    "regularize",
    "state_dict_from_torch",
    "state_dict_to_torch",
    "use_backend",
]
