"""``python bench/gpu.py``: everything a GPU can prove of this package, in one command of under ten minutes.

On a bare machine with torch, nvcc and ninja, and no network, from a checkout: builds the C++ and CUDA libraries in
place, runs the tests that need a GPU (those whose packages are missing are skipped and listed), runs small stages under
compute-sanitizer, then measures every workload of ``bench/gpu_workloads.py`` against its peers with the roofline beside
each row. After each step ``gpu.json`` in ``--out`` is written anew, so a run that is cut short leaves what it had; a
chart ``gpu.png`` comes last. ``--rehearse`` goes the same way on a machine without a GPU, over a toy workload.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Seconds a step may take. Together under ten minutes, the machine's start included.
LIMITS = {"build": 150, "tests": 120, "memcheck": 40, "racecheck": 40, "measure": 190}
SECONDS_A_PASS = 1.0
STEPS = tuple(LIMITS)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python bench/gpu.py", description=__doc__)
    made.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="DIR", help="default: build/gpu")
    made.add_argument("--only", action="append", default=[], choices=STEPS, help="this step; may be repeated")
    made.add_argument("--match", default="", metavar="TEXT", help="only workloads whose name holds this")
    made.add_argument("--seconds", type=float, default=SECONDS_A_PASS, help="measuring time of a pass")
    made.add_argument("--limit", type=float, metavar="S", help="seconds for each step, instead of the built-in ones")
    made.add_argument("--rehearse", action="store_true", help="without a GPU: the same steps over a toy workload")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every step went well; 1 if one failed or ran out of time; 2 where there is no GPU."""
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.rehearse and (missing := _no_gpu()):
        print(f"bench/gpu.py: error: {missing}; --rehearse goes through the steps without one", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"schema": 1, "machine": _machine(), "rehearsal": options.rehearse, "steps": {}}
    for name in options.only or STEPS:
        limit = options.limit or LIMITS[name]
        print(f"--- {name} (at most {limit:.0f} s)", flush=True)
        start = time.perf_counter()
        try:
            outcome = STEP_FUNCTIONS[name](options, limit)
        except subprocess.TimeoutExpired:
            outcome = {"status": "out of time"}
        outcome["seconds"] = round(time.perf_counter() - start, 1)
        report["steps"][name] = outcome
        _write(options.out / "gpu.json", report)
        print(f"--- {name}: {outcome['status']} in {outcome['seconds']} s", flush=True)
    _draw(report, options.out)
    print(f"\nsaved {options.out / 'gpu.json'}")
    return 0 if all(step["status"] in ("passed", "skipped") for step in report["steps"].values()) else 1


def _no_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _machine() -> dict[str, Any]:
    import torch

    from bench.machine import commit

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "nvcc": _first_line(["nvcc", "--version"], "release"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": _first_line(driver, ""),
        }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    return found


def _first_line(command: list[str], holding: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    text = subprocess.run(command, capture_output=True, text=True).stdout
    return next((line.strip() for line in text.splitlines() if holding in line), None)


# ------------------------------------------------------------------------------------------------------- steps


def _run(command: list[str], limit: float, log: Path, **environment: str) -> int:
    """The status of a command in the checkout, its output in ``log``, whose end is shown where it fails."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w") as file:
        status = subprocess.run(
            command, cwd=ROOT, timeout=limit, stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": paths} | environment,
        ).returncode  # fmt: skip
    if status:
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:]))
    return status


def build(options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The libraries, in place."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    cuda = "0" if options.rehearse else "1"
    status = _run(command, limit, options.out / "build.log", WNFUSED_CUDA=cuda, WNFUSED_REQUIRE_EXTENSIONS="1")
    return {"status": "failed" if status else "passed"}


def tests(options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The tests that need a GPU, with what was skipped and why."""
    found = options.out / "tests.xml"
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", f"--junit-xml={found}", "-p", "no:cacheprovider"]
    status = _run(command, limit, options.out / "tests.log")
    suite = ElementTree.parse(found).getroot().find("testsuite")
    assert suite is not None
    skipped = {f"{c.get('name')}: {s.get('message')}" for c in suite.iter("testcase") for s in c.iter("skipped")}
    failed = [
        c.get("name") for c in suite.iter("testcase") if c.find("failure") is not None or c.find("error") is not None
    ]
    print(f"{suite.get('tests')} tests, {len(failed)} failed, {len(skipped)} skipped", *sorted(skipped), sep="\n  ")
    return {
        "status": "passed" if status in (0, 5) else "failed",
        "count": int(suite.get("tests", 0)), "failed": failed, "skipped": sorted(skipped),
    }  # fmt: skip


def _sanitizer(tool: str) -> Callable[[argparse.Namespace, float], dict[str, Any]]:
    def step(options: argparse.Namespace, limit: float) -> dict[str, Any]:
        if shutil.which("compute-sanitizer") is None or options.rehearse:
            return {"status": "skipped", "why": "no compute-sanitizer" if not options.rehearse else "a rehearsal"}
        command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", sys.executable, "-m", "bench.gpu_small"]
        log = options.out / f"{tool}.log"
        status = _run(command, limit, log)
        summary = [line for line in log.read_text(errors="replace").splitlines() if "SUMMARY" in line]
        return {"status": "failed" if status else "passed", "summary": summary[-1:]}

    return step


def measure(options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Every workload against its peers, until time is up."""
    from bench import cases, gpu_workloads, report, roofline

    chosen = gpu_workloads.REHEARSAL if options.rehearse else gpu_workloads.WORKLOADS
    chosen = tuple(w for w in chosen if options.match in w.name)
    rates = None if options.rehearse else roofline.measure()
    end = time.perf_counter() + limit
    results, rows, left_out = [], [], []
    for workload in chosen:
        if time.perf_counter() > end:
            left_out.append(workload.name)
            continue
        print(f"  {workload.group}: {workload.name}", file=sys.stderr, flush=True)
        try:
            found = list(cases.run(workload, options.seconds, "cpu" if options.rehearse else "cuda"))
        except Exception as error:  # one workload that fails, out of memory perhaps, must not cost the others
            left_out.append(f"{workload.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        results += found
        for result in found:
            row = result.to_dict()
            if rates is not None and result.base:
                precision = result.base.split()[2]
                least = roofline.floor(workload, result.pass_name, precision, rates)
                row["floor"] = asdict(least) | {"share": least.seconds / result.seconds[result.base].median}
            rows.append(row)
    for group in dict.fromkeys(result.group for result in results):
        print(f"\n{group}\n" + report.plain_table(*report.table([r for r in results if r.group == group])))
    for row in rows:
        if "floor" in row:
            share, bound = row["floor"]["share"], row["floor"]["bound"]
            print(f"  {row['workload']}, {row['pass_name']}: {share:.0%} of the roofline ({bound})")
    print(*left_out, sep="\n")
    wrong = [row["workload"] for row in rows if row["failed"] or not row["base"]]
    return {
        "status": "failed" if wrong else "out of time" if left_out else "passed",
        "rates": asdict(rates) if rates else None, "results": rows, "left_out": left_out, "wrong": wrong,
    }  # fmt: skip


STEP_FUNCTIONS: dict[str, Callable[[argparse.Namespace, float], dict[str, Any]]] = {
    "build": build,
    "tests": tests,
    "memcheck": _sanitizer("memcheck"),
    "racecheck": _sanitizer("racecheck"),
    "measure": measure,
}


# ------------------------------------------------------------------------------------------------------ output


def _write(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def _draw(report: dict[str, Any], folder: Path) -> None:
    """Bars of the ratios, by workload; nothing where matplotlib is missing or nothing was measured."""
    rows = [row for row in report["steps"].get("measure", {}).get("results", []) if row["ratios"]]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is not installed")
        return
    if not rows:
        return
    bars = [
        (f"{row['workload']}, {row['pass_name']}", peer, spread["median"])
        for row in rows
        for peer, spread in row["ratios"].items()
    ]
    figure = Figure(figsize=(10, 0.22 * len(bars) + 1.5), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(bars)), [ratio for _, _, ratio in bars], color="#4c6ef5")
    axis.set_yticks(range(len(bars)), [f"{title}: {peer}" for title, peer, _ in bars], fontsize=6)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.axvline(1, color="#212529", linewidth=1)
    axis.set_xlabel("time of the peer / time of ours: right of the line ours is faster")
    machine = report["machine"]
    axis.set_title(
        f"{machine.get('device', 'rehearsal')}, torch {machine['torch']}, commit {machine['commit']}", fontsize=9
    )
    figure.savefig(folder / "gpu.png", dpi=110)


if __name__ == "__main__":
    sys.exit(main())
