"""Imports flow one way: no module of the package imports from a later level than its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wnfused

PACKAGE = Path(__file__).parents[1] / "wnfused"
LEVELS = (
    {"optional", "_numbers", "_modules", "_reachable", "_spatial", "_symbolic", "_undisturbed", "_convolution"},
    {"reference"},
    {"backends"},
    {"dispatch"},
    {"ops", "functional", "linalg"},
    {"nn"},
    {"init"},
    {"_surgery", "_tracing", "convert", "fold", "frozen", "checkpoints", "parameter_groups", "memory", "models"},
    {"diagnostics", "regularize"},
    {"train"},
    {"information", "cli"},
)
"""Each part of the package under its name; the package itself and ``__main__`` may import all of them."""

LEVEL = {part: i for i, parts in enumerate(LEVELS) for part in parts}
LEVEL["__init__"] = LEVEL["__main__"] = len(LEVELS)
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(source: str) -> Iterator[str]:
    """The parts of the package that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "wnfused":
            parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from (part if part in LEVEL else "__init__" for part in parts)
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from (name[1] if name[1:] else "__init__" for name in names if name[0] == "wnfused")


# What the command line is made of works on the package as a user does.
USERS = ("train", "information", "cli")


@pytest.mark.parametrize("file", [pytest.param(file, id=str(file.relative_to(PACKAGE))) for file in FILES])
def test_imports_flow_one_way(file: Path) -> None:
    own = part_of(file)
    later = {part for part in imported(file.read_text()) if LEVEL[part] > LEVEL[own]}
    assert later <= ({"__init__"} if own in USERS else set()), f"{own} comes before {', '.join(sorted(later))}"


def test_every_import_is_found() -> None:
    source = (
        "import wnfused\nimport torch, wnfused.nn.conv\nfrom wnfused import ops, convert, fold as f\n"
        "def late():\n    from wnfused.train.run import train\n"
    )
    assert list(imported(source)) == ["__init__", "nn", "ops", "convert", "fold", "train"]


@pytest.mark.parametrize("name", ["diagnostics", "train"])
def test_what_is_imported_when_it_is_asked_for_is_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(wnfused), name, raising=False)
    assert {name, "frozen", "WNLinear"} <= set(dir(wnfused))


def test_layers_import_nothing_that_takes_long() -> None:
    """``import wnfused`` brings nothing but the package and what torch has imported; so does a layer's first step."""
    script = (
        "import sys, torch\nfrom torch.nn.utils.parametrizations import weight_norm\n"
        "before = set(sys.modules)\nimport wnfused\n"
        "wnfused.convert(weight_norm(torch.nn.Linear(3, 4)))(torch.ones(2, 3)).sum().backward()\n"
        "print(*sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'wnfused'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert not [name for name in found if name.split(".")[0] != "torch"]
    assert "torch._dynamo" not in found
    assert "torch.distributed.tensor" not in found
