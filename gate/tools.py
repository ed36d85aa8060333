"""The compilers' companions: where they are, and which version."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from pathlib import Path


class ToolMissingError(RuntimeError):
    """A tool that a route of the gate needs is not on this machine; the message names it."""


@functools.cache
def tool(name: str) -> str:
    """The path of ``nvcc``, ``cuobjdump``, ``nvdisasm`` or ``c++filt``: on PATH, of the CUDA toolkit, or Triton's.

    Raises:
        ToolMissingError: it is in none of these places.
    """
    places = [None, "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    for place in places:
        found = shutil.which(name, path=place)
        if found is not None:
            return found
    raise ToolMissingError(f"{name} is not on this machine (looked on PATH, in /usr/local/cuda/bin and in Triton)")


@functools.cache
def version(name: str) -> str:
    return run([tool(name), "--version"])


def run(command: list[str]) -> str:
    """The standard output of a command.

    Raises:
        RuntimeError: it failed; the message is what it printed.
    """
    return _done(command).stdout


def said(command: list[str]) -> str:
    """What a command that goes well prints on standard error: a compiler's warnings.

    Raises:
        RuntimeError: it failed; the message is what it printed.
    """
    return _done(command).stderr


def _done(command: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:1])}: {(result.stderr or result.stdout).strip()}")
    return result
