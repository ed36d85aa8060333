"""The C++ sources: includes flow one way, and nothing plain is compiled for an instruction set."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
CPU = CSRC / "cpu"
FOLDERS = re.findall(r"^\| `([a-z0-9_]+)/` \|", (CSRC / "README.md").read_text(), re.M)
"""Those of csrc/cpu as its README lists them, from the bottom up."""

FILES = [pytest.param(file, id=str(file.relative_to(CPU))) for file in sorted(CPU.rglob("*.*"))]
TARGETS = sorted((CPU / "targets").glob("*.cpp"))
OPENS = re.compile(r'#include "cpu/targets/target_(?!end)\w+\.h"|#define WNFUSED_ISA ')


def included(text: str) -> list[str]:
    return re.findall(r'^#include [<"]([^">]+)[">]', text, re.M)


def reached(names: Iterable[str]) -> set[str]:
    """The headers that these includes bring, directly or not; those of other libraries by their names alone."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            if (CSRC / name).exists():
                waiting += included((CSRC / name).read_text())
    return found


def is_kernel(name: str) -> bool:
    """Whether a header is of an instruction set, or opens or closes the part of a file that is."""
    if name.startswith("cpu/targets/target_") or name == "immintrin.h":
        return True
    return (CSRC / name).exists() and "WNFUSED_ISA" in (CSRC / name).read_text()


def plain_in_target(text: str) -> set[str]:
    """The plain headers that a file of ``targets`` meets only after it opened its target."""
    opened = OPENS.search(text)
    assert opened, "no target"
    before, after = (reached(included(part)) for part in (text[: opened.start()], text[opened.start() :]))
    assert not any(map(is_kernel, before)), "a kernel outside of a target"
    return {name for name in after - before if not is_kernel(name)}


def test_lines_are_as_short_as_those_of_python() -> None:
    """The width that ruff holds the Python code to."""
    sources = [file for folder in (CSRC, Path(__file__).parent) for file in folder.rglob("*.*")]
    for file in sources:
        if file.suffix in (".h", ".cpp", ".cu"):
            lines = file.read_text().splitlines()
            assert not [f"{file}:{n}" for n, line in enumerate(lines, 1) if len(line) > 120]


def test_the_readme_lists_every_folder() -> None:
    assert sorted(FOLDERS) == sorted(folder.name for folder in CPU.iterdir() if folder.is_dir())
    assert not [file for file in CPU.iterdir() if file.is_file()]


@pytest.mark.parametrize("file", FILES)
def test_includes_flow_one_way(file: Path) -> None:
    own = FOLDERS.index(file.parent.name)
    names = [name for name in included(file.read_text()) if name.startswith("cpu/")]
    assert all((CSRC / name).exists() for name in names)
    later = [name for name in names if FOLDERS.index(name.split("/")[1]) > own]
    assert not later, f"{file.parent.name} comes before these"


def code(file: Path) -> str:
    return re.sub(r"//.*", "", file.read_text())


@pytest.mark.parametrize("file", FILES)
def test_no_file_knows_a_type_of_a_later_folder(file: Path) -> None:
    """A header finds them without an include where its includer has brought them."""
    later = [CPU / folder for folder in FOLDERS[FOLDERS.index(file.parent.name) + 1 :]]
    plain = [header for folder in later for header in folder.glob("*.h") if "WNFUSED_ISA" not in header.read_text()]
    types = {name for header in plain for name in re.findall(r"^(?:struct|class|enum class) (\w+)", code(header), re.M)}
    assert not types & set(re.findall(r"\w+", code(file)))


DECLARED = re.compile(r"^(?!\s)[\w:<>,*& ]+[ *&](\w+)\([^;{}]*\);", re.M)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_a_folder_declares_it_defines(folder: str) -> None:
    """Else it would link against a later one, past the includes."""
    files = [code(file) for file in sorted((CPU / folder).iterdir())]
    plain = [header for header in (CPU / folder).glob("*.h") if "WNFUSED_ISA" not in header.read_text()]
    names = {name for header in plain for name in DECLARED.findall(code(header))}
    defined = {name: rf"^(?!\s)[\w:<>,*& ]+[ *&]{name}\([^;{{}}]*\)\s*{{" for name in names}
    missing = [name for name, pattern in defined.items() if not any(re.search(pattern, t, re.M) for t in files)]
    assert not missing


@pytest.mark.parametrize("file", TARGETS, ids=lambda file: file.name)
def test_targets_compile_nothing_plain(file: Path) -> None:
    assert plain_in_target(file.read_text()) == set()


def test_a_plain_header_in_a_target_is_found() -> None:
    kernels = '#include "cpu/targets/target_avx2.h"\n#include "cpu/stage/forward.h"\n'
    assert "cpu/conv/division.h" in plain_in_target(kernels)
    assert "cpu/conv/division.h" not in plain_in_target('#include "cpu/conv/division.h"\n' + kernels)
    with pytest.raises(AssertionError, match="outside"):
        plain_in_target('#include "cpu/stage/forward.h"\n' + kernels)
