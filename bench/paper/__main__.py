"""``python -m bench.paper``: the papers' figures and tables. Run from the root of the checkout.

A run that is stopped goes on where it was; what is finished is not done again. Without ``--only`` all figures are
made and RESULTS.md is written.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from bench.paper import FIGURES, figure, progress, publish, runner

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "bench" / "paper" / "results"
MINUTES = 60.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    size.add_argument("--full", action="store_true", help="the papers' own settings, without a budget; days on a GPU")
    made.add_argument("--only", action="append", default=[], metavar="FIGURE", help="may be repeated")
    made.add_argument("--list", action="store_true", help="name the figures and end")
    made.add_argument(
        "--report",
        action="store_true",
        help="run nothing; judge and draw what there is: jobs' results, or published data",
    )
    made.add_argument(
        "--minutes", type=float, metavar="M", help=f"of two cores, for all figures together; default {MINUTES:g}"
    )
    made.add_argument("--workers", type=int, default=2, metavar="N", help="processes of one thread; default 2")
    made.add_argument("--jobs", type=Path, metavar="DIR", help="the jobs' results; default build/paper/SIZE")
    made.add_argument(
        "--results", type=Path, metavar="DIR", help="data and pictures; default bench/paper/results, or else with jobs"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a job failed; 2 for a wrong argument; 130 when interrupted."""
    options = parser().parse_args(arguments)
    unknown = [name for name in options.only if name not in FIGURES]
    if unknown:
        parser().error(f"--only {unknown[0]}: is not a figure; there are {', '.join(FIGURES)}")
    if options.workers < 1:
        parser().error(f"--workers {options.workers}: must be at least 1")
    if options.minutes is not None and not options.minutes > 0:
        parser().error(f"--minutes {options.minutes}: must be above 0")
    names = [name for name in FIGURES if not options.only or name in options.only]
    if options.list:
        for name in names:
            module = figure.load(name)
            print(f"{name:<10} {module.MINUTES:>4g} min  {module.TITLE} ({module.SOURCE})")
        return 0
    size = "quick" if options.quick else "full" if options.full else "small"
    jobs = options.jobs or ROOT / "build" / "paper" / size
    results = options.results or (PUBLISHED if size == "small" else jobs / "results")
    target = ROOT / "RESULTS.md" if results == PUBLISHED else results / "RESULTS.md"
    workers = 0 if options.report else options.workers
    for option, folder in (("--jobs", jobs), ("--results", results)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser().error(f"{option} {folder}: cannot be made a folder: {error.strerror}")
    return make(names, size, options.minutes, workers, jobs, results, target)


def make(
    names: list[str], size: str, minutes: float | None, workers: int, jobs: Path, results: Path, target: Path
) -> int:
    """Run the figures' jobs, keeping their results in ``jobs``; write data and pictures to ``results`` and the page
    over all that lie there to ``target``. ``minutes``: of two cores, None for the size's default. Without workers
    nothing is run."""
    scratch = jobs / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    works = [runner.Work.of(name, size, jobs, _core_minutes(name, size, minutes)) for name in names]

    def finished(work: runner.Work) -> None:
        try:
            content = publish.publish(work, size, results)
            if content is None and workers == 0:
                content = publish.rejudge(work.name, results)
        except Exception as error:  # one figure's reduction or picture is no reason to lose the others
            work.errors["reduction"] = str(error)
            traceback.print_exception(error)
            return
        if content is None:
            print(f"{work.name}: nothing to show")
            return
        print(f"{work.name}: {content['title']}")
        for line in publish.lines(content):
            print(f"    {line}", flush=True)
        publish.write_results(results, target)

    shown = progress.Bars(works) if sys.stdout.isatty() else progress.Lines(works)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with shown:
            runner.run(works, workers, scratch, shown, finished)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenProcessPool:
        print("a worker process was killed; the same command goes on from here", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"-> {target}")
    return 1 if any(work.errors for work in works) else 0


def _core_minutes(name: str, size: str, minutes: float | None) -> float | None:
    """The figure's share of ``minutes`` of two cores; None for no limit."""
    if size != "small" and minutes is None:
        return None
    return 2 * figure.load(name).MINUTES * (minutes or MINUTES) / MINUTES


if __name__ == "__main__":
    sys.exit(main())
