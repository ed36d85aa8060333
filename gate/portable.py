"""``python -m gate.portable``: the C++ libraries by clang, and by GCC for aarch64, where no test runs.

Every file of csrc/cpu is compiled to machine code, since what an instruction set's functions may inline and what their
assembly means shows no earlier; of the other libraries the language is checked. Warnings are errors. Answers with 0,
with 1 where a file does not compile, and with 77 where a compiler is missing (Debian: clang, g++-aarch64-linux-gnu).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sysconfig import get_path

from torch.utils.cpp_extension import include_paths

from setup import CPU_FLAGS, STABLE_ABI, WITH_TORCH

ROOT = Path(__file__).parents[1]
COMPILERS = ("clang++", "aarch64-linux-gnu-g++")
FLAGS = {"cpu": STABLE_ABI, "autograd": WITH_TORCH, "python": WITH_TORCH}  # of the libraries
SYSTEM = [f"-isystem{path}" for path in (*include_paths(), get_path("include"))]  # their own warnings are theirs


def errors(compiler: str, source: Path, folder: str) -> str | None:
    """What ``compiler`` has against ``source``, or None."""
    library = source.relative_to(ROOT / "csrc").parts[0]
    target = Path(folder) / f"{compiler}-{source.parent.name}-{source.stem}.o"
    command = [compiler, *CPU_FLAGS, "-O1", "-Werror", *FLAGS[library], "-fPIC", f"-I{ROOT / 'csrc'}", *SYSTEM]
    command += ["-c", "-o", str(target)] if library == "cpu" else ["-fsyntax-only"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    return done.stderr if done.returncode else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gate.portable", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default: 2)")
    options = parser.parse_args(arguments)
    found = [compiler for compiler in COMPILERS if shutil.which(compiler)]
    sources = sorted(source for library in FLAGS for source in (ROOT / "csrc" / library).rglob("*.cpp"))
    work = [(compiler, source) for compiler in found for source in sources]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        said = list(pool.map(lambda pair: errors(*pair, folder), work))
    for (compiler, source), text in zip(work, said, strict=True):
        if text is not None:
            print(f"{compiler} {source.relative_to(ROOT)}:\n{text}")
    red = sum(text is not None for text in said)
    print(f"{len(work)} files compiled by {' and '.join(found) or 'no compiler'}, {red} of them red")
    for compiler in COMPILERS:
        if compiler not in found:
            print(f"NOT CHECKED: {compiler} is not on PATH")
    if red or not sources:
        return 1
    return 0 if len(found) == len(COMPILERS) else 77


if __name__ == "__main__":
    sys.exit(main())
