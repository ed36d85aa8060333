"""The one way to ask for an optional library."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingDependencyError(ImportError):
    """An optional library is not installed; the message holds the command that installs it."""


def require(name: str, what_for: str) -> ModuleType:
    """Import an optional library, e.g. ``require("lightning.pytorch", "training")``.

    Raises:
        MissingDependencyError: if the library is absent. A library that is there and fails to import keeps
            its own error.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        raise MissingDependencyError(
            f"{what_for} needs {top}, which is not installed: "
            'in the checkout, pip install --no-build-isolation ".[train]"'
        ) from None
