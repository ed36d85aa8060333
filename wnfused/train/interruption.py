"""A run that is told to stop, by Ctrl-C or by SIGTERM, says where it stopped and how to go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from wnfused.train.errors import KeepsMessage


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where the program was, as Ctrl-C is: ``except Exception`` lets both through."""


class InterruptedRun(KeepsMessage, KeyboardInterrupt):
    """A training run was stopped. What its last finished epoch left is in its folder.

    Attributes:
        signal: SIGINT or SIGTERM.
    """

    def __init__(self, stopped_by: signal.Signals, where: str) -> None:
        super().__init__(where)
        self.signal = stopped_by

    def bare(self) -> KeyboardInterrupt:
        """The interruption alone, for a caller whose run cannot go on."""
        return Terminated() if self.signal == signal.SIGTERM else KeyboardInterrupt()


def signal_of(error: BaseException) -> signal.Signals | None:
    """The signal behind an exception; None if it is no interruption.

    Lightning makes ``SystemExit`` of both: of Ctrl-C once it has shut down, with the interrupt as its context, and of
    a SIGTERM that it caught itself, at the end of a mini-batch.
    """
    if isinstance(error, InterruptedRun):
        return error.signal
    if isinstance(error, Terminated):
        return signal.SIGTERM
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit):
        if type(error).__name__ == "SIGTERMException":
            return signal.SIGTERM
        if error.__context__ is not None:
            return signal_of(error.__context__)
    return None


def _terminate(number: int, frame: FrameType | None) -> None:
    # A second one, while the first is being dealt with, ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def raises_after(handler: Any) -> Callable[[int, FrameType | None], None]:
    """A handler of SIGTERM that first does what ``handler`` did, one that ``signal.getsignal`` gave."""

    def handle(number: int, frame: FrameType | None) -> None:
        if callable(handler):
            handler(number, frame)
        _terminate(number, frame)

    return _terminate if handler is _terminate else handle


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """While this holds, SIGTERM raises ``Terminated``. Signals belong to the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
