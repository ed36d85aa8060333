"""``python -m gate``: compiles, prints the table, and answers with 0 for green, 1 for red, 77 for a missing tool."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from gate import cuda_kernels, tools, triton_kernels
from gate.jobs import Job, verdicts
from gate.rows import ARCHITECTURES, Verdict

GREEN, RED, TOOL_MISSING = 0, 1, 77


ROUTES: dict[str, tuple[Callable[[list[int]], Iterator[Job]], tuple[str, ...]]] = {
    "triton": (triton_kernels.jobs, ("cuobjdump", "nvdisasm", "c++filt")),
    "cuda": (cuda_kernels.jobs, ("nvcc", "cuobjdump", "nvdisasm", "c++filt")),
}
"""The two kinds of source: how their jobs are listed, and the tools without which they cannot run."""


def missing(route: str) -> str | None:
    """Why a route cannot run on this machine, or None."""
    try:
        for name in ROUTES[route][1]:
            tools.tool(name)
    except tools.ToolMissingError as error:
        return str(error)
    return triton_kernels.missing() if route == "triton" else None


HEADINGS = ("kernel", "configuration", "arch", "registers", "spills", "shared", "matrix instruction", "")


def table(found: Sequence[Verdict]) -> str:
    """One line for each compiled configuration."""
    lines = [HEADINGS] + [_line(verdict) for verdict in found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _line(verdict: Verdict) -> tuple[str, ...]:
    entry, arch = verdict.entry, ARCHITECTURES[verdict.capability].name
    fault = "RED: " + "; ".join(verdict.faults) if verdict.faults else ""
    if entry is None:
        return (verdict.kernel, verdict.configuration, arch, "", "", "", "", fault)
    instructions = ", ".join(f"{name} x{count}" for name, count in sorted(entry.instructions.items()))
    numbers = (str(entry.registers), str(entry.local_accesses), str(verdict.shared))
    return (verdict.kernel, verdict.configuration, arch, *numbers, instructions or "-", fault)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gate", description=__doc__)
    parser.add_argument("--only", choices=ROUTES, help="one kind of kernel (default: both)")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    skipped: dict[str, str] = {}
    jobs: list[Job] = []
    for route in [options.only] if options.only else ROUTES:
        reason = missing(route)
        if reason is None:
            jobs += list(ROUTES[route][0](options.arch or list(ARCHITECTURES)))
        else:
            skipped[route] = reason
    found = verdicts(jobs, options.jobs)
    print(table(found))
    red = sum(bool(verdict.faults) for verdict in found)
    print(f"\n{len(found)} compiled kernels, {red} red, in {time.perf_counter() - start:.0f} s")
    for route, reason in skipped.items():
        print(f"NOT CHECKED: the {route} kernels: {reason}")
    if red or not (found or skipped):  # a gate that looks at nothing is none
        return RED
    return TOOL_MISSING if skipped else GREEN


if __name__ == "__main__":
    sys.exit(main())
