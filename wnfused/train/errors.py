"""The one exception that a user's mistake raises here, and the one way to ask for an optional library."""

from __future__ import annotations

import importlib
from types import ModuleType


class UsageError(ValueError):
    """A wrong argument: says which one, what it was, and what would be right. The command line exits with 2.

    >>> raise UsageError("depth", 101, "must be 6N + 4: the nearest are 100 and 106")
    Traceback (most recent call last):
    wnfused.train.errors.UsageError: --depth 101: must be 6N + 4: the nearest are 100 and 106
    """

    def __init__(self, argument: str, value: object, right: str) -> None:
        self.argument, self.value, self.right = argument, value, right
        super().__init__(f"--{argument.replace('_', '-')} {value}: {right}")


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
            f"{what_for} needs {top}, which is not installed: pip install 'wnfused[train]'"
        ) from None
