"""The processes of a run, before Lightning has set anything up."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Of several processes the first speaks for all. torchrun, Lightning's launcher and SLURM number them by these."""
    number = os.environ.get("RANK", os.environ.get("LOCAL_RANK"))
    if number is None and "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in _BY_HAND:
        number = os.environ.get("SLURM_PROCID")
    return number in (None, "0")


# SLURM's jobs in which a user types commands; as in Lightning, they are one process.
_BY_HAND = ("bash", "interactive")
