"""The built libraries ask torch for nothing but its stable C functions, so that one build serves many torches."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import wnfused

LIBRARIES = sorted(Path(wnfused.__file__).parent.glob("_c*.so"))
HEADERS = ("csrc/stable/c/shim.h", "csrc/inductor/aoti_torch/c/*.h", "csrc/inductor/aoti_torch/generated/c_shim_cpu.h")


def undefined(library):
    """Symbols that others must define, but the C libraries' (they have versions) and weak ones (they need nobody)."""
    found = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    symbols = [line.split() for line in found.stdout.splitlines()]
    return {name for kind, name in symbols if kind == "U" and "@" not in name}


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_a_library_needs_only_the_stable_abi(library):
    folder = Path(torch.__file__).parent / "include" / "torch"
    texts = [header.read_text() for pattern in HEADERS for header in folder.glob(pattern)]
    stable = set(re.findall(r"\b(?:aoti_)?torch_\w+", "".join(texts)))
    needed = undefined(library)
    assert "torch_call_dispatcher" in needed
    rest = {name for name in needed - stable if not name.startswith(("_ZNSt", "_ZNKSt", "_ZSt"))}
    assert rest == set()


def test_the_sources_name_what_the_oldest_torch_has():
    """The headers of torch 2.11, the libraries' target, have this macro under another name, and that one elsewhere."""
    for source in sorted((Path(__file__).parents[1] / "csrc").rglob("*.*")):
        text = source.read_text()
        assert "STABLE_TORCH_ERROR_CODE_CHECK" not in text, source
        assert "STD_CUDA_" not in text or "<torch/csrc/stable/macros.h>" in text, source
