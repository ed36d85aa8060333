"""What memory a process may count on: limits of control groups, of files as the kernel writes them, and ranks."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NONE = 2**63 - 1

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    target = tmp_path_factory.mktemp("memory_size") / "memory_size"
    csrc = HERE.parent / "csrc"
    sources = [HERE / "memory_size.cpp", csrc / "cpu" / "machine" / "memory_size.cpp"]
    subprocess.run(["g++", "-std=c++17", f"-I{csrc}", *sources, "-o", target], check=True)
    return target


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "1000\n"}, 1000),
        ("0::/\n", {"memory.max": "max\n"}, NONE),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "700\n"}, 700),
        ("0::/a/b\n", {"a/b/memory.max": "300\n", "a/memory.max": "700\n"}, 300),
        ("0::/a/b\n", {"a/b/memory.max": "900\n", "a/memory.max": "700\n", "memory.max": "800\n"}, 700),
        ("0::/of/the/host\n", {"memory.max": "500\n"}, 500),  # as in a container that sees its own group as the root
        ("0::/a:b\n", {"a:b/memory.max": "400\n"}, 400),
        ("5:cpu:/c\n4:freezer,memory:/m\n0::/\n", {"memory/m/memory.limit_in_bytes": "600\n"}, 600),
        ("4:memory:/m\n", {"memory/m/memory.limit_in_bytes": "9223372036854771712\n"}, 9223372036854771712),
        ("4:memory:/m\n0::/u\n", {"memory/m/memory.limit_in_bytes": "600\n", "u/memory.max": "200\n"}, 200),
        ("4:cpu,memoryless:/m\n", {"memory/m/memory.limit_in_bytes": "600\n"}, NONE),
        ("nothing known\n\n", {}, NONE),
        (None, {"memory.max": "1000\n"}, NONE),
    ],
)
def test_least_limit_of_a_process(program, tmp_path, groups, limits, expected):
    if groups is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in limits.items():
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    printed = subprocess.run([program, tmp_path], check=True, capture_output=True, text=True).stdout
    assert int(printed.split()[0]) == expected


@pytest.mark.parametrize(("given", "ranks"), [(None, 1), ("8", 8), ("1", 1), ("0", 1), ("-3", 1), ("eight", 1)])
def test_ranks_of_torchrun_share_what_there_is(program, tmp_path, monkeypatch, given, ranks):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    printed = subprocess.run([program, tmp_path], check=True, capture_output=True, text=True).stdout
    assert int(printed.split()[1]) == ranks
