"""Compiles the stand-ins for CUDA's runtime, driver and cuSOLVER, and csrc/cuda on the emulated machine."""

from __future__ import annotations

import functools
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from gate.tools import run, said, tool
from setup import CUDA_ARCHITECTURES, STABLE_ABI

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc"
TORCH = Path(torch.__file__).parent / "lib"
MAJOR = int((torch.version.cuda or "0").partition(".")[0])
RUNTIME, DRIVER, KERNELS = f"libcudart.so.{MAJOR}", "libcuda.so.1", "_cuda.so"
SOLVER = "libcusolver.so.12" if MAJOR >= 13 else "libcusolver.so.11"


def libraries() -> Path:
    """The folder where they lie, built anew if a source is younger."""
    folder = HERE.parents[1] / "build" / "pretended"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*HERE.rglob("*.*"), *SOURCES.rglob("*.*")]
    made = [folder / name for name in (RUNTIME, DRIVER, SOLVER, KERNELS)]
    newest = max(source.stat().st_mtime for source in sources)
    if not all(path.exists() and path.stat().st_mtime > newest for path in made):
        versions = folder / "versions"
        versions.write_text(f"{RUNTIME} {{ global: *; }};\n")
        _shared(folder, RUNTIME, HERE / "runtime.cpp", r"(?:__)?cuda[A-Z]\w*", f"-Wl,--version-script={versions}")
        _shared(folder, DRIVER, HERE / "driver.cpp", r"cu[A-Z]\w*")
        _shared(folder, SOLVER, HERE / "solver.cpp", r"cusolver\w+")
        _kernels(folder)
    return folder


def _compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or "c++"


@functools.cache
def _headers() -> list[str]:
    """Of the toolkit, which knows where they are; of the libraries' own, which come with torch's wheels."""
    asked = said([tool("nvcc"), "--dryrun", "-x", "cu", os.devnull])
    wheels = sorted((TORCH.parents[1] / "nvidia").glob("cu*/include"))
    return [*re.findall(r'INCLUDES="(-I[^"]+)"', asked), *(f"-I{path}" for path in wheels)]


def _missing(prefix: str, defined: str) -> str:
    """Definitions of all that torch's libraries ask of one of CUDA's and ``defined`` has not: "not supported"."""
    asked: set[str] = set()
    for library in (*TORCH.glob("*.so"), *TORCH.parent.glob("_C*.so")):
        for line in run(["nm", "-D", "--undefined-only", str(library)]).splitlines():
            asked.update(re.findall(rf"\bU ({prefix})(?:@|$)", line.strip()))
    names = sorted(name for name in asked if not re.search(rf"\b{name}\(", defined))
    return "".join(f'extern "C" int {name}() {{ return 801; }}\n' for name in names)


def _shared(folder: Path, name: str, source: Path, prefix: str, *options: str) -> None:
    rest = folder / f"{source.stem}_rest.cpp"
    rest.write_text(_missing(prefix, source.read_text()))
    command = [_compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", *_headers(), str(source), str(rest)]
    run([*command, *options, f"-Wl,-soname,{name}", "-o", str(folder / name)])


def kernel_command() -> list[str]:
    """Compiles a file of csrc/cuda so that every primitive is the emulated machine's."""
    architectures = ",".join(f"{a}0" for a in CUDA_ARCHITECTURES)
    flags = ["-std=c++20", "-O2", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-DUSE_CUDA"]
    # launch.h of this folder stands before the one that the tests of the emulation have.
    includes = [f"-I{HERE}", f"-I{SOURCES}", *(f"-I{path}" for path in include_paths()), *_headers()]
    return [_compiler(), *flags, f"-D__CUDA_ARCH_LIST__={architectures}", *STABLE_ABI, *includes, "-x", "c++", "-c"]


def _kernels(folder: Path) -> None:
    command = kernel_command()
    machine = (s for s in (SOURCES / "emulation").glob("*.cpp") if '"emulation/arrays.h"' not in s.read_text())
    sources = sorted([*(SOURCES / "cuda").glob("*.c*"), *machine])  # without what meets numpy arrays

    def compiled(source: Path) -> str:
        target = folder / f"{source.name}.o"
        run([*command, str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    linked = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_cuda", "-lc10_cuda", str(folder / RUNTIME), "-ldl"]
    run([_compiler(), "-shared", *objects, f"-L{TORCH}", *linked, "-o", str(folder / KERNELS)])
