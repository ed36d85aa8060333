"""The one exception that a user's mistake raises here."""

from __future__ import annotations


class UsageError(ValueError):
    """A wrong argument: says which one, what it was, and what would be right. The command line exits with 2.

    >>> raise UsageError("depth", 101, "must be 6N + 4: the nearest are 100 and 106")
    Traceback (most recent call last):
    wnfused.train.errors.UsageError: --depth 101: must be 6N + 4: the nearest are 100 and 106
    """

    def __init__(self, argument: str, value: object, right: str) -> None:
        self.argument, self.value, self.right = argument, value, right
        super().__init__(f"--{argument.replace('_', '-')} {value}: {right}")
