"""``python -m gate.pretended tests|bench``: the GPU's tests, or its workloads, on pretended GPUs.

Answers with pytest's status, or with 1 where a workload fails; with 77 where torch was not built for CUDA.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gate.pretended import build

ROOT = Path(__file__).parents[2]
PARTS = {
    # As many arrays as tensors: in a pool, what a kernel reads or writes beyond one belongs to the pool.
    "tensors": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    # A graph's memory is kept for it by the pool.
    "graphs": {},
}

NO_TEST = 5
"""pytest's status where it finds none."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gate.pretended", description=__doc__)
    parser.add_argument("what", choices=("tests", "bench"))
    parser.add_argument("--match", default="", metavar="TEXT", help="only tests or workloads whose name holds this")
    options = parser.parse_args(arguments)
    if torch.version.cuda is None:
        print("NOT CHECKED: torch is a CPU build")
        return 77
    if options.what == "bench":
        return _run([sys.executable, "-m", "gate.pretended.workloads", options.match], {"WNFUSED_PRETENDED": "shapes"})
    pytest = [sys.executable, "-m", "pytest", "-p", "gate.pretended.plugin", "-p", "no:cacheprovider", "-W", "ignore"]
    statuses = []
    for part, environment in PARTS.items():
        command = [*pytest, f"--pretended={part}", "-k", options.match, "tests/test_gpu.py"]
        statuses.append(_run(command, {"WNFUSED_PRETENDED": "numbers", "OMP_NUM_THREADS": "1", **environment}))
    return _together(statuses, some_may_be_empty=bool(options.match))


def _together(statuses: Sequence[int], some_may_be_empty: bool) -> int:
    """The first status that is not 0; a part without a test, where others have some, counts as 0 if it may."""
    ran = [status for status in statuses if status != NO_TEST] if some_may_be_empty else statuses
    return next(filter(None, ran), 0) if ran else NO_TEST


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The status of a process that takes the stand-ins for CUDA's libraries."""
    folder = build.libraries()
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    # Torch would load its own before it looks there.
    first = os.pathsep.join(str(folder / name) for name in (build.RUNTIME, build.SOLVER))
    environment |= {"LD_PRELOAD": first, "LD_LIBRARY_PATH": path, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode


if __name__ == "__main__":
    sys.exit(main())
