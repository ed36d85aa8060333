"""Where and when a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import wnfused


def facts() -> dict[str, Any]:
    """What a reader needs to judge or repeat a run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": "cpu",
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": instruction_set(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "wnfused": wnfused.__version__,
        "backends": wnfused.backend_status(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def instruction_set() -> str:
    """That of our kernels where they tell, otherwise torch's."""
    if wnfused.backend_status()["native"] is None:
        return str(torch.ops.wnfused_native.cpu_isa())
    return f"{torch.backends.cpu.get_cpu_capability()} (torch's)"


def commit() -> str | None:
    """The checkout's commit, with ``+`` if files other than results differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        # git trusts no folder of another user's, as a container's checkout may be, unless it is named.
        command = ["git", "-c", f"safe.directory={here.parent.resolve()}", *arguments]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
