"""Builds the emulation of the CUDA kernels (csrc/emulation) with g++ and runs cases on it.

The kernels' own sources are compiled, so whatever is wrong in them shows here. Every object file is kept under
``build/emulation`` by the hash of all that went into it. ``planted`` changes a copy of the headers first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc"
CACHE = ROOT / "build" / "emulation"
TABLES = ("stage_bfloat16", "stage_tf32", "stage_float32", "stage_large_from90", "stage_sm90a")
MACHINE = (
    "machine",
    "machine_memory",
    "machine_phases",
    "machine_products",
    "primitives",
    "hopper_primitives",
    "layer",
    "layer_kernels",
    "small_linear",
    "small_linear_kernels",
    "module",
)
UNITS = (
    "cuda/stage_driver.cu", *(f"cuda/{table}.cu" for table in TABLES), *(f"emulation/{name}.cpp" for name in MACHINE),
)  # fmt: skip
# Most of the time is the compiler's, hence -O1. Registers that nobody set hold a pattern; fibers jump between stacks,
# which fortified jumps refuse.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE",
         "-ftrivial-auto-var-init=pattern"]  # fmt: skip
# A configuration in a table, up to the end of its name; the arguments before it may go on over several lines.
ENTRY = r' {4}(?:stage|large|warpgroup)_entry<[^"]*"([^"]*)"'


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"the emulation needs a C++ compiler; {compiler!r} is not on the path")
    return compiler


@functools.cache
def _version() -> str:
    return subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((_version(), *FLAGS, *parts)).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Tree:
    """The sources, as they are or changed: path below csrc -> text."""

    texts: dict[str, str]
    planted_in: Tree | None = None  # what it was before a bug

    @staticmethod
    @functools.cache
    def original() -> Tree:
        files = [p for folder in ("cuda", "emulation") for p in sorted((SOURCES / folder).iterdir())]
        return Tree({str(p.relative_to(SOURCES)): p.read_text() for p in files})

    def replaced(self, file: str, old: str, new: str) -> Tree:
        """With ``old`` replaced by ``new``; ``old`` must be there, exactly once."""
        count = self.texts[file].count(old)
        assert count == 1, f"{file} has {count} times, not once: {old!r}"
        return Tree({**self.texts, file: self.texts[file].replace(old, new)}, self.planted_in or self)

    def only(self, entries: set[str]) -> Tree:
        """With those configurations alone, and of the layers of few samples one kind: quicker to compile."""
        texts = dict(self.texts)
        for table in TABLES:
            texts[f"cuda/{table}.cu"] = re.sub(
                ENTRY + r"\),\n",
                lambda entry: entry[0] if entry[1] in entries else "",
                texts[f"cuda/{table}.cu"],
            )
        for file, others in (
            ("emulation/small_linear.cpp", "  if .* return body"),
            ("emulation/small_linear_kernels.cpp", r"WNFUSED_SMALL_LINEAR\((?!Bfloat16, float)"),
        ):
            lines = texts[file].splitlines(keepends=True)
            texts[file] = "".join(line for line in lines if not re.match(others, line))
        return Tree(texts)

    def includes(self, unit: str) -> dict[str, str]:
        """The unit and, by path, every header of the tree that it includes."""
        found, queue = {}, [unit]
        while queue:
            path = queue.pop()
            if path in found or path not in self.texts:
                continue
            found[path] = self.texts[path]
            queue += re.findall(r'#include "(.*)"', self.texts[path])
        return dict(sorted(found.items()))

    def build(self) -> Path:
        """The module's library. Units without kernels, unless changed themselves, are as they were before the bug."""
        before = self.planted_in or self
        changed = [_has_kernels(u, self.texts[u]) or self.texts[u] != before.texts[u] for u in UNITS]
        trees = [self if own else before for own in changed]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(Tree.compiled, trees, UNITS))
        library = CACHE / _digest(*(o.name for o in objects)) / "wnfused_emulation.so"
        if not library.exists():
            _run(["-shared", *map(str, objects)], library)
        return library

    def compiled(self, unit: str) -> Path:
        """A unit's object file."""
        import pybind11

        texts = self.includes(unit)
        key = _digest(pybind11.__version__, sysconfig.get_python_version(), *texts, *texts.values())
        target = CACHE / f"{Path(unit).stem}-{key}.o"
        if not target.exists():
            tree = CACHE / f"{Path(unit).stem}-{key}-{os.getpid()}"
            for path, text in texts.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_text(text)
            includes = [f"-I{tree}"]
            if any("<pybind11/" in text for text in texts.values()):
                includes += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
            _run([*FLAGS, *includes, "-x", "c++", "-c", str(tree / unit)], target)
            shutil.rmtree(tree)
        return target


def _has_kernels(unit: str, text: str) -> bool:
    """Whether a planted bug may be in a header of the unit; those of the module itself have tests of their own."""
    return re.search(ENTRY, text) is not None or unit in (
        "emulation/layer_kernels.cpp", "emulation/small_linear_kernels.cpp",
    )  # fmt: skip


def _run(arguments: list[str], target: Path) -> None:
    """Runs the compiler; the target appears at once or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run([_compiler(), *arguments, "-o", str(partial)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    partial.replace(target)


@functools.cache
def load(library: Path) -> ModuleType:
    # A name of its own, or pybind11 gives back the module of another library.
    spec = importlib.util.spec_from_file_location(f"emulation_{library.parent.name}.wnfused_emulation", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def emulation() -> ModuleType:
    """The module built from the sources as they are."""
    pytest.importorskip("pybind11")
    return load(Tree.original().build())


def names() -> list[str]:
    """Of all configurations, read off the tables, so that collecting tests builds nothing."""
    texts = Tree.original().texts
    return [name for table in TABLES for name in re.findall(ENTRY, texts[f"cuda/{table}.cu"])]


def entry(module: ModuleType, name: str) -> dict[str, Any]:
    """The facts of a configuration."""
    return next(facts for facts in module.entries() if facts["name"] == name)


MARGIN = 512
SENTINEL = 0xA5


class Guarded:
    """Arrays between margins that must stay as they are; outputs start as NaN, so what nobody wrote shows.

    The machine gives up a kernel that touches anything else by way of the primitives, which leaves the host's code.
    """

    def __init__(self) -> None:
        self._spaces: list[np.ndarray] = []

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy of a tensor, strides kept, bfloat16 as uint16."""
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        extent = sum((n - 1) * s for n, s in zip(bits.shape, bits.stride(), strict=True)) + 1 if bits.numel() else 0
        space = np.full(extent * bits.element_size() + 2 * MARGIN, SENTINEL, np.uint8)
        space = space if space.ctypes.data % 16 == 0 else np.full(space.size + 16, SENTINEL, np.uint8)
        start = MARGIN + (-space.ctypes.data) % 16
        inner = space[start : start + extent * bits.element_size()].view(bits.numpy().dtype)
        array = np.lib.stride_tricks.as_strided(inner, bits.shape, [s * bits.element_size() for s in bits.stride()])
        array[...] = bits.numpy()
        self._spaces.append(space[:start])
        self._spaces.append(space[start + extent * bits.element_size() :])
        return array

    def output(self, tensor: torch.Tensor) -> np.ndarray:
        return self.array(torch.full_like(tensor, float("nan")))

    def faults(self) -> list[str]:
        intact = all((margin == SENTINEL).all() for margin in self._spaces)
        return [] if intact else ["a kernel wrote outside its arrays"]


def tensor_of(array: np.ndarray) -> torch.Tensor:
    t = torch.from_numpy(np.array(array))
    return t.view(torch.bfloat16) if t.dtype == torch.uint16 else t


DTYPES = (torch.bfloat16, torch.float32, torch.float32)
"""Of x, by the precision of a configuration: bfloat16, tf32, float32."""


@dataclass
class Case:
    """One call of the stage, forward and backward, on one configuration."""

    entry: dict[str, Any]
    images: int
    blocks: int = 2
    skip_scale: float = 0.9
    recompute: int = 0
    parameters: bool = True
    channels_last: bool = False
    parameter_dtype: torch.dtype = torch.float32
    reverse: bool = False
    segment_bytes: int = 1 << 29
    multiprocessors: int = 256
    backward: str = ""  # the configuration of the backward, if it is another one
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c, h, w = (self.entry[k] for k in ("channels", "height", "width"))
        dtype = DTYPES[self.entry["precision"]]
        torch.manual_seed(0)
        shape = (self.images, c, h, w)
        made = {
            "x": torch.randn(shape).to(dtype),
            "dy": torch.randn(shape).to(dtype),
            "v": torch.randn(self.blocks, 2, c, c, 3, 3).to(self.parameter_dtype),
            "g": (torch.rand(self.blocks, 2, c) + 0.5).to(self.parameter_dtype),
            "bias": (torch.randn(self.blocks, 2, c) * 0.1).to(self.parameter_dtype),
        }
        if self.channels_last:
            for name in ("x", "dy"):
                made[name] = made[name].contiguous(memory_format=torch.channels_last)
        self.inputs = {**made, **self.inputs}

    def run(self, module: ModuleType) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The outputs by name, and what the machine and the margins found."""
        guarded = Guarded()
        x, dy, v, g, bias = (guarded.array(self.inputs[k]) for k in ("x", "dy", "v", "g", "bias"))
        n, c, h, w = self.inputs["x"].shape
        kept = -(-self.blocks // self.recompute) if self.recompute else self.blocks
        out = {
            "y": guarded.output(self.inputs["x"]),
            "norm": guarded.output(torch.empty(self.blocks, 2, c)),
            "maps": guarded.output(
                torch.empty(
                    (kept, 1 if self.recompute else 2, n, h, w, c),
                    dtype=torch.float32 if self.recompute else self.inputs["x"].dtype,
                )
            ),
            "dx": guarded.output(self.inputs["dy"]),
        }
        if not self.recompute:
            # Starting as ones: what nobody wrote lets every gradient through.
            out["signs"] = guarded.array(
                torch.full((self.blocks, n, self.entry["sign_bytes"]), 0xFF, dtype=torch.uint8)
            )
        if self.parameters:
            out |= {f"d{name}": guarded.output(self.inputs[name]) for name in ("v", "g", "bias")}
        name = self.entry["name"]
        found = module.forward(
            name, x, v, g, bias, self.skip_scale, self.recompute, out["y"], out["norm"], out["maps"],
            out.get("signs"), self.reverse,
        )  # fmt: skip
        if not found:
            found = module.backward(
                self.backward or name, dy, v, g, bias, out["norm"], out["maps"], out.get("signs"), self.skip_scale,
                self.recompute, out["dx"], out.get("dv"), out.get("dg"), out.get("dbias"), self.reverse,
                self.segment_bytes, self.multiprocessors,
            )  # fmt: skip
        return {k: tensor_of(a) for k, a in out.items()}, found + guarded.faults()
