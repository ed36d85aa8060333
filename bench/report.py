"""The table of ratios, in colour where rich is installed and as plain text otherwise; and the JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Spread
from bench.peers import PEERS
from bench.result import Result
from bench.workloads import WORKLOADS

SCHEMA = 2
FILE = "bench.json"
PASSES = {"forward": "fwd", "forward+backward": "fwd+bwd", "training step": "step"}


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            value = seconds * factor
            return f"{value:.{max(0, 2 - max(0, len(str(int(value))) - 1))}f} {unit}"
    raise AssertionError("the last unit takes everything")


def ratio(spread: Spread) -> str:
    """``median [quartiles]``, marked where the peer is faster than ours."""
    digits = 0 if spread.median >= 100 else 1 if spread.median >= 10 else 2
    low, median, high = (f"{value:.{digits}f}" for value in (spread.low, spread.median, spread.high))
    return f"{median} [{low} {high}]" + (" <" if spread.median < 1 else "")


def nanoseconds(spread: Spread) -> str:
    """The range of the quartiles, one number where they are the same."""
    low, high = (f"{value * 1e9:.0f}" for value in (spread.low, spread.high))
    return f"{low} ns" if low == high else f"{low}-{high} ns"


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of one group; the columns are the peers that appear in it, and what was measured beside them."""
    names = list(dict.fromkeys(n for r in results for n in (*r.ratios, *r.failed) if n != r.base))
    columns = [column for column in _BESIDE if any(column.shown(result) for result in results)]
    header = ["workload", "pass", "ours", "backend", *(f"{name} / ours" for name in names)]
    header += [*(column.title for column in columns), "rounds"]
    return header, [_row(result, names, columns) for result in results]


@dataclass(frozen=True)
class _Column:
    title: str
    shown: Callable[[Result], Any]  # whether a group with this result has the column
    cell: Callable[[Result], str | None]


_BESIDE = (
    _Column(
        "a layer",
        lambda result: result.group in ("depth", "deep", "flat"),
        lambda result: result.layers and duration(result.seconds[result.base].median / result.layers),
    ),
    _Column(
        "of peak",
        lambda result: result.share,
        lambda result: result.share and f"{result.share.median:.0%} {result.ceiling}",
    ),
    _Column(
        "memory",
        lambda result: result.peak_bytes,
        lambda result: ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result.peak_bytes.items()),
    ),
    _Column(
        "core to core",
        lambda result: result.crossing,
        lambda result: result.crossing and nanoseconds(result.crossing),
    ),
)


def _row(result: Result, names: list[str], columns: Sequence[_Column]) -> list[str]:
    row = [result.workload, PASSES.get(result.pass_name, result.pass_name)]
    if not result.base:
        return [*row, "no result", *[""] * (len(names) + 1 + len(columns)), "0"]
    row += [duration(result.seconds[result.base].median), result.base]
    for name in names:
        absent = "wrong" if name in result.failed else "-"
        row.append(ratio(result.ratios[name]) if name in result.ratios else absent)
    return [*row, *(column.cell(result) or "-" for column in columns), str(result.rounds)]


def print_groups(groups: Iterable[tuple[str, list[Result]]]) -> None:
    """Prints each group's table as it arrives, then what the columns mean."""
    used: set[str] = set()
    for name, results in groups:
        _print_table(name, *table(results))
        for result in results:
            used.update(result.seconds)
            for distance, part in result.apart.items():
                ratios = ", ".join(f"{peer} / ours {ratio(spread)}" for peer, spread in part.ratios.items())
                title = f"{result.workload}, {PASSES.get(result.pass_name, result.pass_name)}"
                print(f"  cores {distance}: {title}, {part.rounds} rounds: {ratios}")
            for kind, notes in (("skipped", result.skipped), ("WRONG", result.failed)):
                for peer, note in notes.items():
                    print(f"  {kind}: {peer} on {result.workload}: {note}")
    print("\nRatios: peer / ours within a round, median [quartiles]; above 1 ours is faster, < marks where it is not.")
    print("Core to core: what a line of memory takes to cross. Rounds are told apart where a host moved the cores.")
    for name, known in PEERS.items():
        if name in used:
            print(f"  {name:<15} {known.title}")


def _print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(f"\n{title}\n" + plain_table(header, rows))
        return
    console = Console()
    if not console.is_terminal:  # rich would squeeze the columns into 80 characters
        print(f"\n{title}\n" + plain_table(header, rows))
        return
    grid = Table(title=title, title_justify="left", header_style="bold")
    for number, name in enumerate(header):
        grid.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell, style=_style(name, cell)) for name, cell in zip(header, row, strict=True)))
    console.print(grid)


def _style(column: str, cell: str) -> str:
    if cell in ("wrong", "no result"):
        return "bold red"
    if column.endswith("/ ours") and cell != "-":
        return "red" if cell.endswith("<") else "green"
    return ""


def plain_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded with spaces."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def save_json(folder: Path, facts: dict[str, Any], options: dict[str, Any], results: Sequence[Result]) -> None:
    """Writes ``bench.json``, whole or not at all."""
    document = {
        "schema": SCHEMA,
        "machine": facts,
        "options": options,
        "peers": {name: peer.title for name, peer in PEERS.items() if not name.startswith("cuda ")},
        "results": [result.to_dict() for result in results],
    }
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(document, file, indent=1, allow_nan=False)
        file.write("\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, folder / FILE)


# What two runs must have in common for their groups to stand in one table.
SAME = ("commit", "cpu", "cpus", "threads", "instruction_set", "torch", "busy")


def load_json(folder: Path) -> tuple[dict[str, Any], list[Result]]:
    """The machine and the results of a saved run.

    Raises:
        ValueError: there is none, or of another form.
    """
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"{path}: there is no such run")
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        raise ValueError(f"{path}: schema {found}, this is {SCHEMA}")
    machine = {"busy": document["options"].get("busy", 0), **document["machine"]}  # runs before had it there alone
    return machine, [Result.from_dict(saved) for saved in document["results"]]


def merged(folder: Path, facts: dict[str, Any], results: Sequence[Result]) -> list[Result]:
    """The run saved in ``folder`` with its rows replaced, or joined, by new ones, in the order of the workloads.

    Raises:
        ValueError: it was made elsewhere, or of another commit.
    """
    before, saved = load_json(folder)
    for name in SAME:
        if before[name] != facts[name]:
            raise ValueError(f"--add: {folder} was measured with {name} {before[name]!r}, this is {facts[name]!r}")
    by_key = {result.key: result for result in (*saved, *results)}
    keys = ((one.group, one.name, name) for w in WORKLOADS for one in w.parts() for name in one.passes)
    order = {key: number for number, key in enumerate(keys)}
    return sorted(by_key.values(), key=lambda result: order.get(result.key, len(order)))
