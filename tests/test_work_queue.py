"""Workers that share the phases of a call, under ThreadSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    target = tmp_path_factory.mktemp("work_queue") / "work_queue"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{HERE.parent / 'csrc'}"]
    built = subprocess.run(
        ["g++", *flags, str(HERE / "work_queue.cpp"), "-o", str(target)], capture_output=True, text=True
    )
    if "tsan" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("there is no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_phases_follow_one_another(program, workers):
    done = subprocess.run([str(program), str(workers)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
