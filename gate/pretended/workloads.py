"""``python -m gate.pretended.workloads TEXT``: those of ``bench/gpu.py`` whose names hold TEXT, without numbers.

Every peer runs at full size, through the same gates and passes, up to the launch of each kernel. Left out are
``torch.compile``, whose kernels a driver loads, and the deeper ones of the networks where TEXT does not name them.
"""

from __future__ import annotations

import dataclasses
import sys

from bench import cases, gate, gpu_workloads
from bench.workloads import Network
from gate.pretended import plugin

DEPTH = 304
"""Of the deepest network that is taken unasked: those of a thousand layers take minutes."""


def main() -> int:
    plugin.start()
    gate.relative_error = lambda *_: 0.0
    passes = red = 0
    for workload in gpu_workloads.WORKLOADS:
        name = f"{workload.group}: {workload.name}"
        deep = isinstance(workload, Network) and workload.depth > DEPTH
        if sys.argv[1] not in name or (deep and not sys.argv[1]):
            continue
        peers = tuple(peer for peer in workload.peers if "compile" not in peer)
        for result in cases.run(dataclasses.replace(workload, peers=peers), 0.001, "cuda"):
            wrong = bool(result.failed) or not result.base  # no base: all of ours were skipped
            passes, red = passes + 1, red + wrong
            said = "; ".join(f"{peer}: {why}" for peer, why in {**result.failed, **result.skipped}.items())
            print(f"{'FAILED' if wrong else 'ok'} {name}, {result.pass_name}", said, flush=True)
    print(f"{red} of {passes} passes failed")
    return 1 if red or not passes else 0


if __name__ == "__main__":
    sys.exit(main())
