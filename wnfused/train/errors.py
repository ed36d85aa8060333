"""The one exception that a user's mistake raises here, and the options' names, by which it tells of them."""

from __future__ import annotations

import copyreg
from typing import Any


def option(argument: str) -> str:
    """The command line's name of an argument; that of ``init_options`` takes one of them at a time."""
    return "--init-option" if argument == "init_options" else f"--{argument.replace('_', '-')}"


class KeepsMessage(BaseException):
    """An exception whose constructor makes the message: a copy or a pickle has it as it was made, wherever it is read.

    Otherwise Python gives the constructor the message alone, which in a pool of processes loses the worker.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(KeepsMessage, ValueError):
    """A wrong argument: says which one, what it was, and what would be right. The command line exits with 2.

    >>> raise UsageError("depth", 101, "must be 6N + 4: the nearest are 100 and 106")
    Traceback (most recent call last):
    wnfused.train.errors.UsageError: --depth 101: must be 6N + 4: the nearest are 100 and 106
    """

    def __init__(self, argument: str, value: object, right: str) -> None:
        self.argument, self.value, self.right = argument, value, right
        super().__init__(f"{option(argument)} {value}: {right}")
