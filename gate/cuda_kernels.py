"""The kernels in CUDA C++: what is expected of the entry functions of each ``csrc/cuda/*.cu``.

Every ``.cu`` is compiled as ``setup.py`` has it compiled, and every entry function checked for spills and shared
memory, named here or not. Machine code is judged for each device that runs it: sm_80's by sm_89's limits too. The PTX
that is shipped for later devices is what sm_100's machine code is made of. A row in ``KERNELS`` adds what the compiler
cannot know: the matrix instruction that must be there. A row that matches no entry function is red, so that a kernel
cannot leave unnoticed. So is a source of which ptxas says that it loses what it was written for: the disassembly of
serialized wgmma looks alike.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gate import cache
from gate.rows import Entry, Expectation, Verdict, broken, judge
from gate.tools import said, tool, version
from setup import CUDA_ARCHITECTURES, NVCC_FLAGS, STABLE_ABI, architectures, machine_code, own_architecture

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc" / "cuda"

FLAGS = [*NVCC_FLAGS, *STABLE_ABI]

LOSS = r"\(C75\d\d\)|Potential Performance Loss|wgmma\S* .*serialized"
"""What ptxas says, as information, where it waits for each wgmma, in C7510 and its neighbours (C7517 and C7519: where
it put a wait or a fence of its own), or ignores setmaxnreg (C7508)."""


class LossError(RuntimeError):
    """ptxas announced a loss; the message is its own."""


@dataclass(frozen=True)
class CudaKernel(Expectation):
    """Expectations of the entry functions of one ``.cu``.

    Args:
        source: the file's name in ``csrc/cuda``.
        entry: regular expression that the demangled name must contain; several entry functions may match.
    """

    source: str = ""
    entry: str = ""

    def matches(self, source: Path, entry: Entry) -> bool:
        return source.name == self.source and re.search(self.entry, entry.name) is not None


KERNELS: tuple[CudaKernel, ...] = (
    *(
        CudaKernel(source=f"stage_{table}.cu", entry=entry, instruction="HMMA")
        for table in ("bfloat16", "tf32", "float32", "large_from90")
        for entry in ("StageKernel<.*, false>", "StageKernel<.*, true>", "GradientKernel<")
    ),
    *(
        CudaKernel(source="stage_sm90a.cu", entry=entry, instruction="HGMMA", multicast=True)
        for entry in ("WarpgroupStageKernel<.*, false>", "WarpgroupStageKernel<.*, true>")
    ),
    CudaKernel(source="stage_sm90a.cu", entry="GradientKernel<", instruction="HMMA"),
    CudaKernel(source="small_linear.cu", entry="SmallLinearForward<", instruction="HMMA"),
    CudaKernel(source="small_linear_backward.cu", entry="SmallLinearBackward<", instruction="HMMA"),
)
"""One row for each family of kernels."""


@dataclass(frozen=True)
class Job:
    """One ``.cu`` compiled to the machine code of one architecture.

    Args:
        target: nvcc's name of it, as ``"80"`` or ``"90a"``.
        capabilities: of the devices that run it, each of which has its own line.
    """

    source: Path
    target: str
    capabilities: tuple[int, ...]
    kernels: tuple[CudaKernel, ...] = KERNELS

    def run(self) -> list[Verdict]:
        try:
            compiled = cache.remembered(self._key(), self._compile)
        except LossError as error:
            return [broken(self.source.name, "", capability, str(error)) for capability in self.capabilities]
        except RuntimeError as error:
            fault = f"does not compile: {error}"
            return [broken(self.source.name, "", capability, fault) for capability in self.capabilities]
        return [verdict for capability in self.capabilities for verdict in self._judged(compiled, capability)]

    def _judged(self, compiled: list[Entry], capability: int) -> Iterator[Verdict]:
        rows = [k for k in self.kernels if k.source == self.source.name]
        for entry in compiled:
            row = next((k for k in rows if k.matches(self.source, entry)), Expectation())
            entry = replace(entry, dynamic_shared=launched_with(entry.name))
            yield judge(self.source.name, _short(entry.name), capability, entry, row)
        for row in rows:
            if not any(row.matches(self.source, entry) for entry in compiled):
                fault = f"no entry function matches {row.entry!r}"
                yield broken(self.source.name, row.entry, capability, fault)

    def _key(self) -> str:
        files = (*included(self.source), *included(Path(STABLE_ABI[-1])))  # the header that comes before every source
        parts = [part for file in files for part in (file.name, file.read_bytes())]
        return cache.key(version("nvcc"), " ".join(FLAGS), LOSS, _torch()[0], self.target, *parts)

    def _compile(self) -> list[Entry]:
        from gate.sass import entries

        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / f"{self.source.stem}.cubin"
            includes = [f"-I{path}" for path in (ROOT / "csrc", *_torch()[1])]
            command = [tool("nvcc"), *FLAGS, *includes, machine_code(self.target)]
            said_of_it = said([*command, "-cubin", str(self.source), "-o", str(cubin)])
            losses = [line.strip() for line in said_of_it.splitlines() if re.search(LOSS, line)]
            if losses:
                raise LossError("; ".join(losses))
            return entries(cubin)


def launched_with(name: str) -> int:
    """Bytes of shared memory that ``launch.h`` asks for when it launches a kernel of this demangled name."""
    found = re.search(r"\brun_kernel<.*, (\d+)>\(", name)
    return int(found[1]) if found else 0


def included(source: Path) -> list[Path]:
    """A source and the headers of this repository that it includes, directly or not, whichever way its macros go."""
    found: dict[Path, None] = {}
    queue = [source]
    while queue:
        file = queue.pop()
        if file in found:
            continue
        found[file] = None
        for name in re.findall(r'^\s*#\s*include\s*"(.*)"', file.read_text(), re.MULTILINE):
            queue += [path for folder in (file.parent, ROOT / "csrc") if (path := folder / name).exists()]
    return sorted(found)


def _torch() -> tuple[str, list[str]]:
    """torch's version and the folders of its headers."""
    import torch
    from torch.utils.cpp_extension import include_paths

    return torch.__version__, include_paths()


def _short(name: str) -> str:
    """A demangled name without its arguments, return type, namespaces and casts, and without what launches it."""
    name = re.sub(r"\(anonymous namespace\)::|\([\w: ]+\)(?=\d)", "", name)
    name = name.split("(")[0].removeprefix("void ")
    return re.sub(r"^run_kernel<(.*), \d+>$", r"\1", re.sub(r"\b\w+::", "", name))


def run_by(capability: int) -> str:
    """The shipped machine code that devices of this capability run: of their generation, and no newer than they are."""
    return str(max(a for a in CUDA_ARCHITECTURES if a // 10 == capability // 10 and a <= capability))


@dataclass(frozen=True)
class Missing:
    """A source that rows are about, and that is not there."""

    source: str
    capabilities: tuple[int, ...]

    def run(self) -> list[Verdict]:
        fault = f"there is no {self.source}, and rows about it"
        return [broken(self.source, "", capability, fault) for capability in self.capabilities]


def jobs(capabilities: list[int]) -> Iterator[Job | Missing]:
    sources = sorted(SOURCES.glob("*.cu"))
    for name in sorted({kernel.source for kernel in KERNELS} - {source.name for source in sources}):
        yield Missing(name, tuple(capabilities))
    for source in sources:
        only = own_architecture(source)
        for target in [only] if only else map(str, architectures(source)):
            own = tuple(c for c in capabilities if target == (f"{c}a" if only else run_by(c)))
            if own:
                yield Job(source, target, own)
