"""The processes of a run, before Lightning has set anything up."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Of several processes the first speaks for all. torchrun and Lightning's launcher number them by these."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
