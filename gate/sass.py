"""What a cubin holds: one ``gate.rows.Entry`` for each entry function, read off ``cuobjdump``."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from gate.rows import MATRIX_INSTRUCTIONS, MULTICAST, Entry
from gate.tools import run, tool

_FUNCTION = re.compile(r"^\s*Function\s*:?\s*([\w$.]+):?\s*$", re.M)
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")
_MATRIX = re.compile(r"\b(" + "|".join(MATRIX_INSTRUCTIONS) + r")\b")
_MULTICAST = re.compile(r"\bUBLKCP(?:\.\w+)*\.MULTICAST\b")


def entries(cubin: Path) -> list[Entry]:
    """The entry functions of a cubin, by demangled name.

    Spills are counted as loads and stores of local memory: a register array that is indexed at run time costs the same
    and counts too.
    """
    if b".text." not in cubin.read_bytes():  # host code alone: cuobjdump finds nothing to disassemble
        return []
    # cuobjdump calls nvdisasm, which must be found on PATH.
    tool("nvdisasm")
    resources = _by_function(run([tool("cuobjdump"), "-res-usage", str(cubin)]))
    sass = _by_function(_disassembly(cubin))
    names = sorted(sass)
    return [
        _entry(demangled, resources[name], sass[name]) for name, demangled in zip(names, _demangle(names), strict=True)
    ]


def _disassembly(cubin: Path) -> str:
    path = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        [tool("cuobjdump"), "-sass", str(cubin)], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    if result.returncode != 0 or "Function" not in result.stdout:
        raise RuntimeError(f"cuobjdump cannot disassemble {cubin.name}: {result.stderr.strip()}")
    return result.stdout


def _by_function(text: str) -> dict[str, str]:
    """Splits a listing at its 'Function' headings."""
    pieces = _FUNCTION.split(text)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _demangle(names: list[str]) -> list[str]:
    return run([tool("c++filt"), *names]).splitlines() if names else []


def _entry(name: str, resources: str, sass: str) -> Entry:
    used = {key: int(number) for key, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", resources)}
    found = _MATRIX.findall(sass) + [MULTICAST] * len(_MULTICAST.findall(sass))
    return Entry(
        name=name,
        registers=used["REG"],
        stack=used["STACK"] + used["LOCAL"],
        shared=used["SHARED"],
        local_accesses=len(_LOCAL.findall(sass)),
        instructions={instruction: found.count(instruction) for instruction in set(found)},
    )
