"""``bench.supervised``: what a worker did counts, whatever became of it afterwards."""

import signal
import subprocess
import sys

import pytest

from bench import supervised

WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from bench.supervised import POISONED, Reporter

items, reporter = Path(sys.argv[1]).read_text().split(), Reporter(Path(sys.argv[2]))
for item in items:
    reporter.begin(item)
    print("at", item, flush=True)
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    reporter.end(item, {"status": "done"})
    if item == "spoil":
        sys.exit(POISONED)
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script)]


def test_each_item_counts_by_itself(command, tmp_path):
    seen = []
    items = ["a", "crash", "b", "spoil", "c", "hang", "d"]
    found = supervised.run(
        command, items, 60, 2, tmp_path / "log", seen=lambda item, outcome: seen.append((item, outcome["status"]))
    )
    assert {item for item in items if found[item] == {"status": "done"}} == {"a", "b", "spoil", "c", "d"}
    assert found["crash"] == {"status": "died", "why": f"the process ended with signal {signal.SIGSEGV.name}"}
    assert found["hang"] == {"status": "died", "why": "nothing happened for 2 s"}
    assert [item for item, _ in seen] == items
    assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("at ")] == items


def test_time_runs_out(command, tmp_path):
    found = supervised.run(command, ["a", "hang", "b"], 2, 60, tmp_path / "log")
    assert found["a"] == {"status": "done"}
    assert found["hang"] == {"status": "died", "why": "time was up"}
    assert found["b"] == {"status": "not reached", "why": "time was up"}


def test_each_item_has_a_patience_of_its_own(command, tmp_path):
    found = supervised.run(command, ["a", "hang", "b"], 60, {"a": 50, "hang": 1, "b": 50}, tmp_path / "log")
    assert found["hang"] == {"status": "died", "why": "nothing happened for 1 s"}
    assert found["a"] == found["b"] == {"status": "done"}


def test_a_worker_that_does_not_start_is_not_started_for_ever(tmp_path):
    found = supervised.run([sys.executable, "-c", "raise SystemExit(3)"], ["a", "b"], 60, 60, tmp_path / "log")
    assert list(found) == ["a", "b"]
    assert all(o == {"status": "not reached", "why": "the process ended with status 3"} for o in found.values())


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_nothing_outlives_its_command(tmp_path):
    """A checker's own child, which holds the device, must not run on beside what is timed afterwards."""
    told = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(97)']); pathlib.Path({str(told)!r}).write_text(str(child.pid)); child.wait()"
    )
    assert supervised.finished([sys.executable, "-c", code], 5, tmp_path / "log") is None
    state = subprocess.run(["ps", "-o", "stat=", "-p", told.read_text()], capture_output=True, text=True).stdout
    assert not state.strip() or state.startswith("Z")


def test_the_status_of_a_command(tmp_path):
    assert supervised.finished([sys.executable, "-c", "print('said')"], 60, tmp_path / "log") == 0
    assert supervised.finished([sys.executable, "-c", "raise SystemExit(9)"], 60, tmp_path / "log") == 9
    assert (tmp_path / "log").read_text() == "said\n"
