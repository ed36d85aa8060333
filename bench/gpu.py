"""``python bench/gpu.py``: everything a GPU can prove of this package, in one command of under ten minutes.

On a bare machine with torch, nvcc and ninja, and no network, from a checkout: builds the C++ and CUDA libraries in
place; then, side by side, runs the tests that need a GPU, those of the Triton kernels after them (what was skipped is
listed with its reason), and small stages under compute-sanitizer; then measures the workloads of
``bench/gpu_workloads.py`` against their peers until time is up, with the roofline beside each row. ``gpu.json`` in
``--out`` is written anew after each step and each pass; tests and measurements run in processes that may crash or hang
without taking the others along (``bench.supervised``), so a run that is cut short leaves what it had. A chart
``gpu.svg`` comes last.

Where the files were copied without ``.git``, ``--commit NAME`` says which they are. Another run with ``--only build
--only measure --match TEXT`` measures what one could not reach. ``--rehearse`` goes the same way on a machine without
a GPU, over a toy workload.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOTAL = 555
"""Seconds after which nothing more is begun. Stopping what runs, rooflines and the chart take half a minute more."""
LIMITS = {
    "build": 170, "tests": 170, "memcheck": 170, "racecheck": 170, "warpgroup memcheck": 60, "warpgroup synccheck": 60,
    "measure": TOTAL,
}  # fmt: skip
"""Seconds a step may take, if as many are left."""
TOGETHER = (("build",), tuple(name for name in LIMITS if name not in ("build", "measure")), ("measure",))
"""Steps that run side by side: nothing but the last is timed."""
PATIENCE = {"tests": 120.0, "untried": 50.0, "rates": 60.0}
"""Seconds for one test, with what it imports and Triton compiles for it; for one of a kernel that Triton does not make
and that may hang; for the machine's ceilings."""
UNTRIED = "warpgroup"
"""In the names of the tests of such a kernel. They have a process of their own."""
TESTS = ("tests/test_gpu.py", "tests/interpreter")
"""In the order in which they run: should time be up, it is for the kernels that pass in Triton's interpreter."""
TEST_PROCESSES = 11
"""At most, beside that one: Triton compiles hundreds of kernels for the tests, a second each."""
ALONE = {"OMP_NUM_THREADS": "2", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""For processes of tests beside others, whatever plugins a machine has."""
SANITIZERS = "sanitizers.log"
SECONDS_A_PASS = 0.5
STEPS = tuple(LIMITS)
# Without pyproject.toml, which setuptools older than this package asks for cannot read and this needs nothing of.
BUILD = (
    "import runpy, setuptools.dist; setuptools.dist.Distribution.parse_config_files = lambda *_, **__: None; "
    f"runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')"
)
WENT_WELL = ("passed", "skipped")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python bench/gpu.py", description=__doc__)
    out = Path(os.environ.get("OUT", ROOT / "build" / "gpu"))
    made.add_argument("--out", type=Path, default=out, metavar="DIR", help="default: $OUT if it is set, else build/gpu")
    made.add_argument("--only", action="append", default=[], choices=STEPS, help="this step; may be repeated")
    made.add_argument("--match", action="append", default=[], metavar="TEXT",
                      help="only workloads whose name holds this; may be repeated: one of these")  # fmt: skip
    made.add_argument("--seconds", type=float, default=SECONDS_A_PASS, help="measuring time of a pass")
    made.add_argument("--limit", type=float, metavar="S", help="seconds for each step, instead of the built-in ones")
    made.add_argument("--commit", metavar="NAME", help="of the files here; default: what git says of them, if it can")
    made.add_argument("--rehearse", action="store_true", help="without a GPU: the same steps over a toy workload")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every step went well; 1 if one failed or ran out of time; 2 where there is no GPU."""
    options = parser().parse_args(arguments)
    end = time.monotonic() + TOTAL
    if not _chosen(options):
        parser().error(f"--match {' '.join(options.match)}: no workload's name holds this")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.rehearse and (missing := _no_gpu()):
        print(f"bench/gpu.py: error: {missing}; --rehearse goes through the steps without one", file=sys.stderr)
        return 2
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))  # not every home can be written to
    (options.out / SANITIZERS).unlink(missing_ok=True)
    report = Report(options, end)
    if report.content["machine"]["commit"] is None:
        print("NO COMMIT: git does not know these files; --commit NAME says which they are", flush=True)
    for together in TOGETHER:
        names = [name for name in together if name in (options.only or STEPS)]
        with ThreadPoolExecutor(len(names) or 1) as pool:
            list(pool.map(report.step, names))
    try:
        _draw(report.content, options.out)
    except Exception:  # the numbers are saved
        traceback.print_exc()
    _print_summary(report.content["steps"])
    print(f"\nsaved {options.out / 'gpu.json'}")
    return 0 if all(step["status"] in WENT_WELL for step in report.content["steps"].values()) else 1


class Report:
    """What ``gpu.json`` holds, and the steps that fill it."""

    def __init__(self, options: argparse.Namespace, end: float) -> None:
        self.options, self.end = options, end
        self.content: dict[str, Any] = {
            "schema": 2, "machine": _machine(options.commit), "rehearsal": options.rehearse, "steps": {},
        }  # fmt: skip
        self._writing = threading.Lock()

    def step(self, name: str) -> None:
        """Runs one step; whatever goes wrong in it is its outcome."""
        limit = self.options.limit or min(LIMITS[name], self.end - time.monotonic())
        print(f"--- {name} (at most {limit:.0f} s)", flush=True)
        start = time.perf_counter()
        try:
            outcome = STEP_FUNCTIONS[name](self, limit)
        except Exception as error:  # a bug of this script's must not cost the other steps
            known = self.content["steps"].get(name, {})
            outcome = known | {"status": "failed", "why": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        outcome["seconds"] = round(time.perf_counter() - start, 1)
        self.has(name, outcome)
        print(f"--- {name}: {outcome['status']} in {outcome['seconds']} s", flush=True)

    def has(self, name: str, outcome: dict[str, Any]) -> None:
        """Takes over what is known of a step, and writes the file, whole or not at all."""
        with self._writing:
            self.content["steps"][name] = outcome
            path = self.options.out / "gpu.json"
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.content, indent=1) + "\n")
            temporary.replace(path)

    def keeps(self, file: str, title: str, text: str) -> None:
        """Adds to a file that several steps share, so that a run leaves few."""
        with self._writing, (self.options.out / file).open("a") as whole:
            whole.write(f"=== {title}\n{text}\n")


def _no_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _machine(named: str | None) -> dict[str, Any]:
    """What a reader needs to judge a run; ``named``: the commit, where the caller says it."""
    import torch

    from bench.machine import commit

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": named or commit(),
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
    found = _tool(command[0])
    if found is None:
        return None
    text = subprocess.run([found, *command[1:]], capture_output=True, text=True).stdout
    return next((line.strip() for line in text.splitlines() if holding in line), None)


def _tool(name: str) -> str | None:
    """A program on PATH or of the CUDA toolkit."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


# ------------------------------------------------------------------------------------------------------- steps


def _run(command: list[str], limit: float, log: Path, **environment: str) -> str | None:
    """How a command in the checkout went wrong, its output in ``log``, whose end is shown; None if it did not."""
    from bench import supervised

    log.unlink(missing_ok=True)
    status = supervised.finished(command, limit, log, **environment)
    if status == 0:
        return None
    print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:]), flush=True)
    return "out of time" if status is None else "failed"


def build(report: Report, limit: float) -> dict[str, Any]:
    """The libraries, in place."""
    command = [sys.executable, "-c", BUILD, "--quiet", "build_ext", "--inplace"]
    environment = {"WNFUSED_CUDA": "0" if report.options.rehearse else "1"}
    # Ninja lies beside the interpreter where it came as a package; without it one file is compiled after the other.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (nvcc := _tool("nvcc")) is not None:
        environment["CUDA_HOME"] = str(Path(nvcc).parents[1])
    wrong = _run(command, limit, report.options.out / "build.log", **environment)
    # The C++ libraries may be missing: what is there of the CUDA one is tested all the same.
    record = ROOT / "wnfused" / "_build.json"
    not_built = json.loads(record.read_text())["not_built"] if record.exists() else {}
    if report.options.rehearse:
        not_built.pop("cuda", None)
    if not_built:
        return {"status": wrong or "failed", "why": "; ".join(not_built.values())}
    return {"status": wrong or "passed"}


def tests(report: Report, limit: float) -> dict[str, Any]:
    """The tests that need a GPU, in several processes, with what was skipped and why."""
    from bench import supervised

    start, worker = time.monotonic(), [sys.executable, "-m", "bench.gpu_worker"]
    with _one_log(report.options.out / "tests.log") as log_of:
        collected = supervised.run([*worker, "collect"], TESTS, limit, limit, log_of("collection"), **ALONE)
        lost = {whole: outcome for whole in TESTS if (outcome := collected.pop(whole))["status"] != "collected"}
        items = list(collected)
        shards = _shards(items)

        def run(number: int) -> dict[str, Any]:
            shard, patience, longest = shards[number]
            left = min(longest, limit - (time.monotonic() - start))
            return supervised.run([*worker, "tests"], shard, left, patience, log_of(str(number)), **ALONE)

        with ThreadPoolExecutor(len(shards) or 1) as pool:
            found = {item: outcome for part in pool.map(run, range(len(shards))) for item, outcome in part.items()}
    by_status: dict[str, dict[str, str]] = {}
    for item, outcome in sorted((found | lost).items()):
        name = item.removeprefix(f"{TESTS[0]}::")
        by_status.setdefault(outcome["status"], {})[name] = outcome.get("why", "")
    passed = len(by_status.pop("passed", {}))
    for status, those in by_status.items():
        if status == "skipped":
            reasons = collections.Counter(those.values())
            print(*(f"{count} tests skipped: {why}" for why, count in reasons.items()), sep="\n")
        else:
            print(f"{len(those)} tests {status}", *(f"{item}: {why}" for item, why in those.items()), sep="\n  ")
    print(f"{len(found)} tests, {passed} passed", flush=True)
    died = any(why != "time was up" for why in by_status.get("died", {}).values())
    wrong = died or "failed" in by_status or not found or not (passed or report.options.rehearse)
    status = "failed" if wrong else "passed" if set(by_status) <= {"skipped"} else "out of time"
    outcome = {"status": status, "count": len(found), "passed": passed, **by_status}
    if not found:
        reasons = dict.fromkeys(whole["why"] for whole in lost.values())
        return outcome | {"why": f"nothing was collected: {'; '.join(reasons) or 'there is no test'}"}
    return outcome


def _shards(items: Sequence[str]) -> list[tuple[list[str], float, float]]:
    """The tests of each process, the patience with one and the seconds for all.

    An untried one that hangs keeps none but its like waiting; the others share the GPU with it until it is stopped.
    """
    known = [item for item in items if UNTRIED not in item]
    untried = [item for item in items if UNTRIED in item]
    shards = [
        (known[first::TEST_PROCESSES], PATIENCE["tests"], LIMITS["tests"])
        for first in range(min(TEST_PROCESSES, len(known)))
    ]
    return [*shards, *([(untried, PATIENCE["untried"], 3 * PATIENCE["untried"])] if untried else [])]


@contextlib.contextmanager
def _one_log(path: Path) -> Iterator[Callable[[str], Path]]:
    """Logs of several processes, by name, that end up one after the other in one file."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield lambda name: Path(folder, name)
        finally:
            with path.open("w") as whole:
                for part in sorted(Path(folder).iterdir()):
                    whole.write(f"=== {part.name}\n{part.read_text(errors='replace')}")


def _sanitizer(tool: str, part: str) -> Callable[[Report, float], dict[str, Any]]:
    """A step; ``part`` of the kernels is what ``bench.gpu_small`` calls it."""

    def step(report: Report, limit: float) -> dict[str, Any]:
        if report.options.rehearse or (found := _tool("compute-sanitizer")) is None:
            return {"status": "skipped", "why": "a rehearsal" if report.options.rehearse else "no compute-sanitizer"}
        known = _help(found)
        # Triton starts compilers, which are none of the sanitizer's business.
        options = [f"--tool={tool}", "--error-exitcode=9", "--target-processes=application-only"]
        if "--launch-timeout" in known:
            # Else a program that has not come to its first kernel in time, with torch to import, goes on unwatched.
            options.append("--launch-timeout=0")
        if tool == "memcheck" and "--report-api-errors" in known:
            # Torch asks the driver for functions that it may not have; a refusal is no fault of a kernel.
            options.append("--report-api-errors=no")
        if tool == "racecheck":
            # Triton orders its kernels' accesses itself, and the vendor's are the vendor's.
            options += _own_kernels(known)
        command = [found, *options, sys.executable, "-m", "bench.gpu_small", part]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            # Each tensor by itself: in a pool, what is read or written beyond one belongs to the pool.
            wrong = _run(command, limit, log, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            said = log.read_text(errors="replace")
        report.keeps(SANITIZERS, f"{part} {tool}", said)
        lines = said.splitlines()
        if any("Device not supported" in line for line in lines):
            return {"status": "skipped", "why": f"{tool} does not support this device"}
        if missing := next((line for line in lines if line.startswith("nothing ran: ")), None):
            return {"status": wrong or "skipped", "why": missing.partition(": ")[2]}
        ran = [line for line in lines if line.startswith("ran ")]
        summary = [line for line in lines if "SUMMARY" in line][-1:]
        if wrong is None and (not summary or "No attachable process" in said):
            return {"status": "failed", "why": f"{tool} did not watch the program", "summary": summary, "ran": ran}
        return {"status": wrong or "passed", "summary": summary, "ran": ran}

    return step


def _help(program: str) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True).stdout


def _own_kernels(known: str) -> list[str]:
    """Options by which compute-sanitizer looks at the kernels of ``csrc/cuda`` alone; releases differ in the name.

    Args:
        known: what it says of its options.
    """
    name = next((option for option in ("--kernel-name", "--kernel-regex") if option in known), None)
    return [] if name is None else [name, "kns=wnfused"]  # their namespace, in their mangled names


def _chosen(options: argparse.Namespace) -> list[Any]:
    """The workloads that ``--match`` leaves."""
    from bench import gpu_workloads

    known = gpu_workloads.REHEARSAL if options.rehearse else gpu_workloads.WORKLOADS
    return [workload for workload in known if any(text in workload.name for text in options.match or [""])]


def measure(report: Report, limit: float) -> dict[str, Any]:
    """The workloads against their peers, pass by pass, until time is up."""
    from bench import gpu_worker, gpu_workloads, supervised

    options = report.options
    workloads = {gpu_worker.key(w, name): w for w in _chosen(options) for name in w.passes}
    so_far: dict[str, Any] = {"status": "cut short", "rates": None, "results": [], "left_out": {}, "wrong": []}
    measured: list[str] = []  # the item of each of the results

    def seen(item: str, outcome: dict[str, Any]) -> None:
        if outcome["status"] != "measured":
            so_far["left_out"][item] = outcome["why"]
        elif item == gpu_worker.RATES:
            so_far.update((name, outcome[name]) for name in ("rates", "warpgroup_clusters"))
        else:
            so_far["results"] += outcome["results"]
            so_far["wrong"] += [item for row in outcome["results"] if row["failed"] or not row["base"]]
            measured.extend([item] * len(outcome["results"]))
        print(f"  {item}: {outcome['status']} {outcome.get('why', '')}", file=sys.stderr, flush=True)
        report.has("measure", so_far)

    command = [sys.executable, "-m", "bench.gpu_worker", f"--seconds={options.seconds}"]
    command += ["--device=cpu"] if options.rehearse else []
    items = [*([] if options.rehearse else [gpu_worker.RATES]), *workloads]
    log = options.out / "measure.log"
    log.unlink(missing_ok=True)
    patience = {item: gpu_workloads.patience(workload) for item, workload in workloads.items()}
    patience[gpu_worker.RATES] = PATIENCE["rates"]
    supervised.run([*command, "measure"], items, limit, patience, log, seen=seen)
    # Last, as those of the deepest networks take seconds.
    found = zip(so_far["results"], measured, strict=True)
    so_far["results"] = [_with_floor(row, workloads[item], so_far["rates"]) for row, item in found]
    _print_results(so_far)
    unreached = all(why == "time was up" for why in so_far["left_out"].values())
    status = "failed" if so_far["wrong"] or not unreached else "out of time" if so_far["left_out"] else "passed"
    return so_far | {"status": status}


def _with_floor(row: dict[str, Any], workload: Any, rates: dict[str, Any] | None) -> dict[str, Any]:
    """A row of results with the roofline's time and the share of it that ours reaches."""
    from bench import roofline
    from bench.workloads import Orthogonal

    if rates is None or not row["base"] or isinstance(workload, Orthogonal):  # of decompositions there is no count
        return row
    least = roofline.floor(workload, row["pass_name"], row["base"].split()[2], roofline.Rates(**rates))
    return row | {"floor": asdict(least) | {"share": least.seconds / row["seconds"][row["base"]]["median"]}}


def _print_results(found: dict[str, Any]) -> None:
    """Two lines a row: who was measured against whom is in ``gpu.json``, with quartiles and errors."""
    from bench.report import duration

    for row in found["results"]:
        print(f"{row['workload']}, {row['pass_name']}:")
        if not row["base"]:
            print("  no result of ours")
            continue
        floor = f", {row['floor']['share']:.0%} of the roofline ({row['floor']['bound']})" if "floor" in row else ""
        ratios = (f"{peer.removeprefix('cuda ')} {spread['median']:.2f}" for peer, spread in row["ratios"].items())
        ours = duration(row["seconds"][row["base"]]["median"])
        print(f"  {row['base'].removeprefix('cuda ')} {ours}{floor}; peer / ours: {', '.join(ratios) or 'none'}")
    for row in found["results"]:
        for peer, why in row["failed"].items():
            print(f"WRONG: {peer} on {row['workload']}, {row['pass_name']}: {why}")
    print(*(f"{item}: {why}" for item, why in found["left_out"].items()), sep="\n", flush=True)


def _print_summary(steps: dict[str, dict[str, Any]]) -> None:
    """How each step ended, last, where a terminal that keeps only the end still shows it."""
    print("\nsteps")
    for name, step in steps.items():
        wrong = [*step.get("failed", {}), *step.get("died", {})] if name == "tests" else []
        print(f"  {name}: {step['status']} in {step['seconds']} s {step.get('why', '')}".rstrip())
        for item in [*wrong[:20], *[".."] * (len(wrong) > 20)]:
            print(f"    {item}")


STEP_FUNCTIONS: dict[str, Callable[[Report, float], dict[str, Any]]] = {
    "build": build,
    "tests": tests,
    "memcheck": _sanitizer("memcheck", "everything"),
    "racecheck": _sanitizer("racecheck", "others"),
    # By themselves, as they may hang. No racecheck: of what the copy engine writes, and a barrier in shared memory
    # orders, it reports hazards that are none.
    "warpgroup memcheck": _sanitizer("memcheck", "warpgroup"),
    "warpgroup synccheck": _sanitizer("synccheck", "warpgroup"),
    "measure": measure,
}


# ------------------------------------------------------------------------------------------------------ output


def _draw(report: dict[str, Any], folder: Path) -> None:
    """Bars of the ratios, by workload; nothing where nothing was measured."""
    from bench.bars import ratio_bars

    rows = report["steps"].get("measure", {}).get("results", [])
    bars = [(f"{row['workload']}, {row['pass_name']}: {name}", ratio) for row in rows for name, ratio in _ratios(row)]
    if not bars:
        return
    machine = report["machine"]
    title = f"{machine.get('device', 'rehearsal')}, torch {machine['torch']}, commit {machine['commit'] or 'unknown'}"
    axis = "time of the peer / time of ours, both in CUDA graphs where the peer is: right of the line ours is faster"
    (folder / "gpu.svg").write_text(ratio_bars(title, bars, axis))


def _ratios(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Each peer beside ours, what was captured beside ours captured if that was measured."""
    captured = row["ratios"].get(f"{row['base']} graph")
    for peer, spread in row["ratios"].items():
        if peer == f"{row['base']} graph":
            continue
        both = peer.endswith(" graph") and captured is not None
        yield peer.removeprefix("cuda "), spread["median"] / (captured["median"] if both else 1.0)


if __name__ == "__main__":
    sys.exit(main())
