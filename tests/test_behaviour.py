"""Every cell of the table of behaviours, and the page that shows it."""

from pathlib import Path

import pytest
from behaviour import COLUMNS, ROWS, page

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("api", COLUMNS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.behaviour)
def test_the_table_tells_what_happens(row, api):
    assert row.outcome(api) == getattr(row, api)


def test_the_page_is_the_table():
    """``python tests/behaviour.py > docs/behaviour.md`` after a change."""
    assert (Path(__file__).parents[1] / "docs" / "behaviour.md").read_text() == page()
