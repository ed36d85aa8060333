"""The tables of measurements in README.md and docs/speed.md are those of the committed runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench is part of the checkout, not of the package

from bench import summary


@pytest.mark.parametrize("page", summary.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_runs(page):
    text = page.read_text()
    assert summary.filled(text, summary.tables()) == text, "run python -m bench.summary"


def test_every_table_has_its_place():
    marked = {match["name"] for page in summary.PAGES for match in summary.MARKED.finditer(page.read_text())}
    tables = summary.tables()
    assert marked == set(tables)


def test_a_row_is_of_the_first_kind_that_fits_and_names_what_plain_wins():
    def row(workload, plain, group="windows"):
        ratios = {"eager": {"median": 2.0}, "plain": {"median": plain}}
        return {"group": group, "workload": workload, "pass_name": "forward", "ratios": ratios}

    rows = [
        row("64 to 128, 32x32, kernel 3, stride 2, batch 8", 0.9),
        row("64 to 128, 16x16x16, kernel 3, stride 2, batch 2", 1.04),
        row("3 to 64, 64x64, kernel 7, stride 2, batch 8", 1.5),
    ]
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in summary._kinds(rows, [], []) if "2.0x" in line}
    assert set(lines) == {"with a stride", "over three dims", "first and last layers, 1 and 3 channels"}
    assert "64 to 128, 32x32, kernel 3, stride 2, batch 8 (0.90x)" in lines["with a stride"]
    assert lines["over three dims"].endswith("| 2.0x to 2.0x | 1.04x to 1.04x |  |")
