"""What the documentation shows runs: every Python block, page by page; every command's arguments; every link.

And the reference leaves no public name out.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch

from wnfused import cli
from wnfused.init import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks, each behind as many empty lines as put its errors on the page's own lines."""
    text = page.read_text()
    found = [m for m in FENCE.finditer(text) if m[1] == language]
    return ["\n" * text.count("\n", 0, m.start(2)) + m[2] for m in found]


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python")]))
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page share their names, as a reader's session would; schemes that they register go with it."""
    monkeypatch.setattr(registry, "_schemes", dict(registry._schemes))
    monkeypatch.setattr(registry, "_data_dependent", set(registry._data_dependent))
    names: dict[str, object] = {"__name__": "__page__"}
    torch.manual_seed(0)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def commands() -> list[object]:
    lines = [(page, line) for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    tables = [(page, m[1]) for page in PAGES for m in re.finditer(r"`(wnfused [^`]*|make [\w -]*)`", page.read_text())]
    return [pytest.param(line, id=f"{page.name}-{line[:60]}") for page, line in {*lines, *tables} if line.strip()]


@pytest.mark.parametrize("line", sorted(commands(), key=lambda p: p.id))
def test_commands_are_understood(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:
        words.pop(0)  # an environment variable
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        rules = re.findall(r"^([\w]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(targets) <= set(rules), f"no such target: {line}"
    elif words[-1] == "--help" or words[1:] in ([command] for command in ("info", "demo", "train", "probe", "bench")):
        with pytest.raises(SystemExit, match="0"):
            cli.main([words[1], "--help"])
    elif "wnfused" in words:
        parsed, others = cli._parser().parse_known_args(words[words.index("wnfused") + 1 :])
        assert parsed.command == "bench" or not others, f"unknown options: {others}"
    else:
        assert words[0] in ("pip", "python", "torchrun", "git", "cd"), f"not a command of this project: {line}"
        if words[0] == "python":
            ran = words[1:][words[1] == "-m" :]
            exists = importlib.util.find_spec(ran[0]) if words[1] == "-m" else (ROOT / ran[0]).exists()
            assert exists, f"there is nothing to run: {line}"


@pytest.mark.parametrize("page", named(PAGES))
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


def test_the_guide_has_every_option_of_every_scheme() -> None:
    """With its default, and none that is no longer there. The table before has every scheme."""
    page = (ROOT / "docs" / "guide" / "initialisation.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \| .+ \| .+ \|$", page, re.M)
    options = {name: registry.options_of(name) for name in registry.schemes()}
    assert len(rows) == len({*rows})
    assert {*rows} == {(name, o, repr(value)) for name, taken in options.items() for o, value in taken.items()}
    overview = page.partition("## Options")[0]
    assert {name for line in re.findall(r"^\| (`.+?) \|", overview, re.M) for name in re.findall(r"`(\w+)`", line)} == {
        *options
    }
    without = re.search(r"^(`.+) have none\.$", page, re.M)
    assert without is not None
    assert {*re.findall(r"`(\w+)`", without[1])} == {name for name, taken in options.items() if not taken}


REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
DOCUMENTED = re.findall(r"^::: ([\w.]+)$(?!\n +options: .*members: false)", REFERENCE, re.M)
NAMESPACES = ("", ".nn", ".functional", ".models", ".init", ".regularize", ".diagnostics", ".train")


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_the_reference_shows_is_no_module(path: str) -> None:
    """Where a function has its module's name, the shorter path is the module's, whose page lacks the function."""
    assert not (ROOT / path.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_name_is_in_the_reference(namespace: str) -> None:
    module = importlib.import_module(f"wnfused{namespace}")
    shown = [getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in DOCUMENTED]
    for name in module.__all__:
        value = getattr(module, name)
        # Lazy layers and ranks of a convolution are told of together.
        together = "Lazy" in name or (namespace == ".functional" and f"{name[:-2]}2d" in REFERENCE)
        assert inspect.ismodule(value) or name == "__version__" or together or any(s is value for s in shown), name
