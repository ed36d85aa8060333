"""Builds the C++ libraries where a compiler and torch are at hand, and says why where they are not.

The libraries use LibTorch's stable ABI (target 2.11) and no Python C API: one binary serves every supported
Python and torch. Two fit only the torch that they were built with: that of the autograd nodes, which the stable ABI
does not have, and the one by which Python enters layers, of that Python alone, too. With others, Python does the same.
A build that fails leaves a working pure-torch package; the reason is written to ``wnfused/_build.json``, which
``wnfused info`` prints.

``WNFUSED_CUDA``: ``auto`` (default) builds the CUDA library where torch is a CUDA build and nvcc is found; ``0`` leaves
it out; ``1`` requires it, also beside a CPU build of torch, which cannot load it: so every kernel is compiled and
linked on a machine without a GPU.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent  # ninja runs elsewhere
CFLAGS = os.environ.get("CFLAGS", "")
STABLE_ABI = [
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-DTORCH_STABLE_ONLY",
    "-DPy_LIMITED_API=0x030a0000",
    "-include",
    str(ROOT / "csrc" / "torch_errors.h"),
]
# NaN and infinities must come out as torch gives them and results must not depend on the build, so no
# -ffast-math and no -march: kernels choose their instruction set at run time.
CPU_FLAGS = [
    "-std=c++17",
    "-O1" if "-fsanitize" in CFLAGS else "-O3",  # what sanitizers add takes -O3 hours
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]

# Of the libraries that include torch's own headers, which are C++20 and full of what these warnings find.
WITH_TORCH = ["-std=c++20", "-Wno-unused-parameter", "-Wno-array-bounds"]

# Python's own flags ask for debug information, nine tenths of a library and a fifth of the time to compile it. With
# CFLAGS=-g it is there.
DEBUG_FLAGS = [] if any(flag.startswith("-g") for flag in CFLAGS.split()) else ["-g0"]

NVCC_FLAGS = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-DUSE_CUDA", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# Machine code for each generation (sm_89 runs sm_80's), and PTX of the last one for those to come. The offline gate
# compiles and judges the same.
CUDA_ARCHITECTURES = [80, 90, 100]


def own_architecture(source):
    """``"90a"`` of x_sm90a.cu, whose instructions that architecture alone has, and no later one either; else None."""
    named = re.fullmatch(r".*_sm(\d+a)", source.stem)
    return named and named[1]


def architectures(source):
    """Which of ``CUDA_ARCHITECTURES`` a file without one of its own is for: of x_from90.cu, those from 90 on."""
    named = re.fullmatch(r".*_from(\d+)", source.stem)
    return [a for a in CUDA_ARCHITECTURES if not named or a >= int(named[1])]


def machine_code(architecture):
    """nvcc's option for it."""
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


OPTIONAL = {"autograd": "the C++ autograd nodes", "python": "the C++ entry from Python"}
reasons: dict[str, str] = {}


def cuda_left_out():
    """Why the CUDA library is not built, None if it is."""
    import torch

    wanted = os.environ.get("WNFUSED_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise ValueError(f"WNFUSED_CUDA: {wanted!r} is not auto, 0 or 1")
    if wanted == "0":
        return "WNFUSED_CUDA=0 left it out of the build"
    if wanted == "auto" and torch.version.cuda is None:
        return "torch was a CPU build when wnfused was built"
    if nvcc():
        return None
    where = f"in {cuda_home()}/bin, as CUDA_HOME says," if cuda_home() else "on PATH"
    return f"nvcc was not found {where} when wnfused was built; put it on PATH or set CUDA_HOME"


def cuda_home():
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def nvcc():
    home = cuda_home()
    return shutil.which(str(Path(home) / "bin" / "nvcc")) if home else shutil.which("nvcc")


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[-1]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def check_toolkit(torch):
    """nvcc's major version must be that of torch's own CUDA libraries."""
    version = re.search(r"release (\d+)\.(\d+)", run([nvcc(), "--version"]))
    if torch.version.cuda and version and version[1] != torch.version.cuda.split(".")[0]:
        raise RuntimeError(
            f"nvcc is of CUDA {version[1]}, torch of {torch.version.cuda}; their major versions must agree"
        )


def build_cuda(library, objects):
    """Compiles csrc/cuda and links it. torch's own build class would refuse to beside a CPU build."""
    import torch
    from torch.utils.cpp_extension import include_paths

    check_toolkit(torch)
    known = run([nvcc(), "--list-gpu-arch"])
    targets = [a for a in CUDA_ARCHITECTURES if f"compute_{a}\n" in known]
    last = f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}"
    includes = [f"-I{ROOT / 'csrc'}", *(f"-I{path}" for path in include_paths())]
    objects.mkdir(parents=True, exist_ok=True)
    # .cpp: code for the host alone
    sources = sorted(p for p in (ROOT / "csrc" / "cuda").iterdir() if p.suffix in (".cu", ".cpp"))

    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))

    def compile(source):
        target = objects / f"{source.stem}.o"
        only = own_architecture(source)
        shared = [*(machine_code(a) for a in targets if a in architectures(source)), last]
        here = [machine_code(only)] if only else shared
        flags = [*NVCC_FLAGS, f"--threads={min(jobs, len(here))}", *STABLE_ABI, *here, *includes]
        run([nvcc(), *flags, "-c", "-o", str(target), str(source)])
        return str(target)

    with ThreadPoolExecutor(jobs) as pool:
        compiled = list(pool.map(compile, sources))
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", *(["-ltorch_cuda", "-lc10_cuda"] if torch.version.cuda else [])]
    library.parent.mkdir(parents=True, exist_ok=True)
    link = [f"-L{Path(torch.__file__).parent / 'lib'}", *libraries, "-cudart", "static"]
    run([nvcc(), "-shared", *compiled, *link, "-o", str(library)])


def extensions():
    try:
        from torch.utils.cpp_extension import CppExtension
    except ImportError:
        why = (
            "torch was not importable when wnfused was built; install torch first, then run "
            "`pip install --no-build-isolation .` in the checkout"
        )
        reasons.update(dict.fromkeys(("cpu", "cuda", *OPTIONAL), why))
        return []
    headers = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h"))

    def library(name, flags, optional=False, of_any_python=True):
        return CppExtension(
            f"wnfused._{name}",
            sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / name).rglob("*.cpp")),
            depends=headers,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args={"cxx": CPU_FLAGS + DEBUG_FLAGS + flags},
            py_limited_api=of_any_python,  # True: none of Python's API at all
            optional=optional,
        )

    return [
        library("cpu", STABLE_ABI),
        library("autograd", WITH_TORCH, optional=True),
        library("python", WITH_TORCH, optional=True, of_any_python=False),
    ]


def build_ext_class():
    try:
        from torch.utils.cpp_extension import BuildExtension
    except ImportError:
        return build_ext

    class OptionalBuildExtension(BuildExtension):
        """A library that does not compile is left out, with its reason recorded."""

        def run(self):
            # setuptools forgets that it builds in place if the build fails.
            root = ROOT if self.inplace else Path(self.build_lib)
            try:
                super().run()
            except Exception as error:
                if os.environ.get("WNFUSED_REQUIRE_EXTENSIONS") == "1":
                    raise
                reasons["cpu"] = f"the C++ build failed: {first_line(error)}"
                self.warn(f"{reasons['cpu']}; wnfused will run in plain torch")
            # Before the minutes of nvcc, and again however they end: without its record the C++ library is not opened.
            reasons["cuda"] = "the CUDA build did not come to its end"
            record(root)
            try:
                self.run_cuda(root / "wnfused" / "_cuda.abi3.so")
            finally:
                record(root)

        def build_extension(self, extension):
            try:
                super().build_extension(extension)
            except Exception as error:
                if not extension.optional or os.environ.get("WNFUSED_REQUIRE_EXTENSIONS") == "1":
                    raise
                name = extension.name.rpartition("._")[2]
                reasons[name] = f"the build of {OPTIONAL[name]} failed: {first_line(error)}"
                self.warn(reasons[name])

        def run_cuda(self, library):
            left_out = cuda_left_out()
            forced = os.environ.get("WNFUSED_CUDA") == "1"
            if left_out is None:
                try:
                    build_cuda(library, Path(self.build_temp) / "cuda")
                    del reasons["cuda"]
                except Exception as error:
                    reasons["cuda"] = f"the CUDA build failed: {first_line(error)}"
                    if forced:
                        raise
                    self.warn(reasons["cuda"])
                return
            reasons["cuda"] = left_out
            if forced:
                raise RuntimeError(left_out)

        def get_outputs(self):
            return [path for path in super().get_outputs() if Path(path).exists()]

    return OptionalBuildExtension


class BuildPy(build_py):
    def run(self):
        super().run()
        if not self.distribution.has_ext_modules():  # where there are, build_ext comes next, and knows what it built
            record(ROOT if self.editable_mode else Path(self.build_lib))


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def record(root: Path) -> None:
    target = root / "wnfused" / "_build.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "not_built": reasons,
        "declarations": declarations(),
        "sources": sources(),
        "torch": torch_version(),
    }
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(target)


def declarations():
    """What libraries built in place must have been built from: with another signature, a call would crash."""
    csrc = ROOT / "csrc"
    folders = (csrc / name for name in ("autograd", "python", "cuda"))
    files = [csrc / "needs.h", csrc / "ops.h", *(file for folder in folders for file in sorted(folder.iterdir()))]
    files.append(ROOT / "wnfused" / "backends" / "native_schemas.py")
    return {file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def sources():
    """One digest of all C++ and CUDA sources, by which a benchmark knows whether it runs what lies there."""
    digest = hashlib.sha256()
    for file in sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file()):
        data = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def torch_version():
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": build_ext_class(), "build_py": BuildPy},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
