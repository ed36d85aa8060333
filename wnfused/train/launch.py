"""The processes of a run, before Lightning has set anything up."""

from __future__ import annotations

import os


def process_number() -> str:
    """From "0" on, as torchrun, Lightning's launcher or SLURM tell it."""
    number = os.environ.get("RANK", os.environ.get("LOCAL_RANK"))
    if number is None and "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in _BY_HAND:
        number = os.environ.get("SLURM_PROCID")
    return number or "0"


def is_first_process() -> bool:
    """Of several processes the first speaks for all."""
    return process_number() == "0"


# SLURM's jobs in which a user types commands; as in Lightning, they are one process.
_BY_HAND = ("bash", "interactive")
