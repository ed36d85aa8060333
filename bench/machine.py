"""Where and when a result was measured."""

from __future__ import annotations

import datetime
import json
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
    """The processor's name with its family and model, or its architecture where the system does not tell.

    A host may hide which of a maker's processors it is from the name, and not from the numbers.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()  # the first processor's
    except OSError:
        return platform.processor() or platform.machine()
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = known.get("model name", platform.machine())
    numbers = [f"{key.split()[-1]} {known[key]}" for key in ("cpu family", "model") if key in known]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def instruction_set() -> str:
    """That of our kernels where they tell, otherwise torch's."""
    if wnfused.backend_status()["native"] is None:
        return str(torch.ops.wnfused_native.cpu_isa())
    return f"{torch.backends.cpu.get_cpu_capability()} (torch's)"


def commit() -> str | None:
    """The checkout's commit, with ``+`` if files other than results differ from it, or the libraries were built of
    other sources than lie there; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        # git trusts no folder of another user's, as a container's checkout may be, unless it is named.
        command = ["git", "-c", f"safe.directory={here.parent.resolve()}", *arguments]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
        added = git("status", "--porcelain", "--", ":/csrc", ":/wnfused")  # what is built and imported, known or not
        differs = changed or added or not _built_of_these_sources()
        return git("rev-parse", "--short=12", "HEAD") + ("+" if differs else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _built_of_these_sources() -> bool:
    """Whether the libraries in the checkout are those of its C++ sources, as far as their build recorded it."""
    from setup import ROOT, sources

    record = ROOT / "wnfused" / "_build.json"
    return not record.exists() or json.loads(record.read_text()).get("sources") == sources()
