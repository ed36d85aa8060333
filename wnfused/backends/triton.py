"""The Triton backend. Its kernels are not part of this release: asking for it by name raises, naming that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def unavailable() -> str | None:
    return "this release has no Triton kernels"


def refusal(op: str, arguments: Sequence[Any]) -> str | None:
    return unavailable()
