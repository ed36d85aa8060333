"""``python -m bench``: the table of ratios, a JSON file and pictures. Run from the root of the checkout."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import wnfused
from bench import cases, machine, picture, report, workloads
from bench.busy import busy
from bench.result import Result
from wnfused.cli import OneLineParser

DEFAULT_FOLDER = Path("build") / "bench"
# Seconds of measuring a case; the gates and the compiler come on top.
BUDGET, QUICK_BUDGET = 5.0, 1.5


def parser() -> argparse.ArgumentParser:
    made = OneLineParser(prog="wnfused bench", description="The table of ratios, a JSON file and pictures.")
    groups = f"{', '.join(workloads.GROUPS)}; may be repeated"
    seconds = f"measuring time of a case, default {BUDGET:g}, with --quick {QUICK_BUDGET:g}"
    made.add_argument("--quick", action="store_true", help="a small selection, in under two minutes on two cores")
    made.add_argument("--group", action="append", default=[], metavar="G", help=groups)
    made.add_argument("--match", default="", metavar="TEXT", help="only workloads whose name holds this")
    out = f"default: {DEFAULT_FOLDER} of the checkout"
    made.add_argument("--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=out)
    made.add_argument("--seconds", type=float, metavar="S", help=seconds)
    made.add_argument("--threads", type=int, metavar="N", help="torch.set_num_threads")
    made.add_argument("--busy", type=int, default=0, metavar="N", help="beside N other programs that never wait")
    made.add_argument("--add", action="store_true", help="keep the other results that DIR has, of the same commit")
    made.add_argument("--show", action="store_true", help="print the tables of the run in DIR and end")
    made.add_argument("--list", action="store_true", help="name the workloads and end")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a peer failed its gate or nothing of ours could be measured; 2 for a wrong argument."""
    options = parser().parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser().error(f"--threads {options.threads}: must be 1 or more")
    if options.busy < 0:
        parser().error(f"--busy {options.busy}: must be 0 or more")
    if options.seconds is not None and not options.seconds >= 0:
        parser().error(f"--seconds {options.seconds}: must be 0 or more")
    try:
        chosen = workloads.select(options.quick, tuple(options.group), options.match)
    except ValueError as error:
        parser().error(str(error))
    if options.show:
        return _show(options.out)
    if options.list:
        print("\n".join(f"{w.group:<8} {w.name}  ({', '.join(w.passes)})" for w in chosen))
        return 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        parser().error(f"--out {options.out}: is a file; name a folder")
    except OSError as error:
        parser().error(f"--out {options.out}: cannot be written: {error.strerror}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    budget = options.seconds if options.seconds is not None else QUICK_BUDGET if options.quick else BUDGET
    wnfused.backend_status()  # opens the libraries
    facts = machine.facts() | {"busy": options.busy}
    _print_facts(facts)
    adds = options.add and (options.out / report.FILE).exists()
    if adds:
        try:
            report.merged(options.out, facts, [])
        except ValueError as error:
            parser().error(str(error))
    made_with = {"quick": options.quick, "seconds": budget}
    results: list[Result] = []

    def save() -> list[Result]:
        kept = report.merged(options.out, facts, results) if adds else results
        report.save_json(options.out, facts, made_with, kept)
        return kept

    with busy(options.busy):
        report.print_groups(_run(chosen, budget, results, save))
    kept = save()
    print("\nsaved", options.out / report.FILE)
    _save_pictures(kept, facts, options.out)
    wrong = [result for result in results if result.failed or not result.base]
    for result in wrong:
        print(f"no result: {result.group}, {result.workload}, {result.pass_name}", file=sys.stderr)
    return 1 if wrong else 0


def _run(
    chosen: list[workloads.Workload], budget: float, results: list[Result], save: Callable[[], Any]
) -> Iterator[tuple[str, list[Result]]]:
    """Each group with its results, which are kept in ``results`` too, and saved: a later group may be killed."""
    for group, members in groupby(chosen, lambda workload: workload.group):
        found: list[Result] = []
        for workload in members:
            print(f"  {group}: {workload.name} ...", file=sys.stderr, flush=True)
            found.extend(cases.run(workload, budget))
        results.extend(found)
        save()
        yield group, found


def _show(folder: Path) -> int:
    try:
        facts, results = report.load_json(folder)
    except ValueError as error:
        parser().error(f"--out {folder}: {error}")
    _print_facts(facts)
    report.print_groups((name, list(found)) for name, found in groupby(results, lambda result: result.group))
    return 0


def _print_facts(facts: dict[str, Any]) -> None:
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "threads", "instruction_set", "torch", "commit", "date")))


def _save_pictures(results: list[Result], facts: dict[str, Any], folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed")
        return
    for name in ("ratios-*.png", "cost_per_layer.png"):
        for old in folder.glob(name):  # of a run of other groups, whose numbers the JSON no longer has
            old.unlink()
    for path in (*picture.ratio_bars(results, facts, folder), *picture.cost_per_layer(results, facts, folder)):
        print("saved", path)


if __name__ == "__main__":
    sys.exit(main())
