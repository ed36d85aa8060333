"""The kernels in CUDA C++: what is expected of the entry functions of each ``csrc/cuda/*.cu``.

Every ``.cu`` is compiled and every entry function checked for spills and shared memory, named here or not. A row in
``KERNELS`` adds what the compiler cannot know: the matrix instruction that must be there, the shared memory that
the launcher asks for. A row that matches no entry function is red, so that a kernel cannot leave unnoticed. So is a
source of which ptxas says that it loses what it was written for: the disassembly of serialized wgmma looks alike.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gate import cache
from gate.rows import ARCHITECTURES, Entry, Expectation, Verdict, broken, judge
from gate.tools import said, tool, version

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc" / "cuda"

FLAGS = [
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-DTORCH_STABLE_ONLY",
    "-DUSE_CUDA",
]

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
        architectures: capabilities for which the source has this entry function; None for all.
    """

    source: str = ""
    entry: str = ""
    architectures: tuple[int, ...] | None = None

    def matches(self, source: Path, entry: Entry) -> bool:
        return source.name == self.source and re.search(self.entry, entry.name) is not None


STAGE_SHARED = 99 * 1024
"""The most that a kernel of the residual stage asks for; ``stage_table.h`` asserts it."""

WARPGROUP_SHARED = 227 * 1024
"""The most that sm_90's own kernels ask for; ``stage_sm90a.cu`` asserts it."""

KERNELS: tuple[CudaKernel, ...] = (
    *(
        CudaKernel(source=f"stage_{precision}.cu", entry=entry, instruction="HMMA", dynamic_shared=STAGE_SHARED)
        for precision in ("bfloat16", "tf32", "float32")
        for entry in ("StageKernel<.*, false>", "StageKernel<.*, true>", "GradientKernel<")
    ),
    *(
        CudaKernel(
            source="stage_sm90a.cu",
            entry=entry,
            instruction="HGMMA",
            dynamic_shared=WARPGROUP_SHARED,
            multicast=True,
        )
        for entry in ("WarpgroupStageKernel<.*, false>", "WarpgroupStageKernel<.*, true>")
    ),
    CudaKernel(source="stage_sm90a.cu", entry="GradientKernel<", instruction="HMMA", dynamic_shared=WARPGROUP_SHARED),
)
"""One row for each family of kernels."""


@dataclass(frozen=True)
class Job:
    """One ``.cu`` for one architecture."""

    source: Path
    capability: int
    kernels: tuple[CudaKernel, ...] = KERNELS

    def run(self) -> list[Verdict]:
        rows = [
            k
            for k in self.kernels
            if k.source == self.source.name and (k.architectures is None or self.capability in k.architectures)
        ]
        try:
            compiled = cache.remembered(self._key(), self._compile)
        except LossError as error:
            return [broken(self.source.name, "", self.capability, str(error))]
        except RuntimeError as error:
            return [broken(self.source.name, "", self.capability, f"does not compile: {error}")]
        found = []
        for entry in compiled:
            row = next((k for k in rows if k.matches(self.source, entry)), Expectation())
            found.append(judge(self.source.name, _short(entry.name), self.capability, entry, row))
        for row in rows:
            if not any(row.matches(self.source, entry) for entry in compiled):
                fault = f"no entry function matches {row.entry!r}"
                found.append(broken(self.source.name, row.entry, self.capability, fault))
        return found

    def _key(self) -> str:
        parts = [part for file in included(self.source) for part in (file.name, file.read_bytes())]
        return cache.key(version("nvcc"), " ".join(FLAGS), LOSS, _torch()[0], str(self.capability), *parts)

    def _compile(self) -> list[Entry]:
        from gate.sass import entries

        target = ARCHITECTURES[self.capability].target
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / f"{self.source.stem}.cubin"
            includes = [f"-I{path}" for path in (ROOT / "csrc", *_torch()[1])]
            generated = f"-gencode=arch=compute_{target},code=sm_{target}"
            command = [tool("nvcc"), *FLAGS, *includes, generated, "-cubin", str(self.source), "-o", str(cubin)]
            losses = [line.strip() for line in said(command).splitlines() if re.search(LOSS, line)]
            if losses:
                raise LossError("; ".join(losses))
            return entries(cubin)


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
    """A demangled name without its argument list, return type and namespaces."""
    name = re.sub(r"\((?:anonymous namespace|int|bool|unsigned int)\)(::)?", "", name)
    name = name.split("(")[0].removeprefix("void ")
    return re.sub(r"\b\w+::", "", name)


def jobs(capabilities: list[int]) -> Iterator[Job]:
    for source in sorted(SOURCES.glob("*.cu")):
        # x_sm90a.cu is for that architecture alone.
        only = re.fullmatch(r".*_sm(\d+a)", source.stem)
        for capability in capabilities:
            if only is None or ARCHITECTURES[capability].target == only[1]:
                yield Job(source, capability)
