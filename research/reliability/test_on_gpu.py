"""What was recorded of inspections on a GPU, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.reliability.on_gpu import HOSTILE, NAMES, rows
from tests.markdown import table
from tests.recordings import text_of

HERE = Path(__file__).parent
COLUMNS = ("patient", "items compared", "changed", "arms that were timed")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text_of(HERE / "h200.json.gz"))
    return document


def test_no_bit_changed_and_every_patient_was_timed(recorded: dict[str, Any]) -> None:
    inspections = recorded["inspections"]
    told = [(each["patient"], each["hostile"]) for each in inspections]
    assert told == [(name, False) for name in NAMES] + [(name, True) for name in HOSTILE]
    for each in inspections:
        assert each["items"] > 100
        assert each["changed"] == []
        assert bool(each["timed"]) is not each["hostile"]


def test_the_page_shows_what_was_recorded(recorded: dict[str, Any]) -> None:
    page = (HERE / "README.md").read_text("utf-8")
    shown = page.partition("<!-- gpu -->\n")[2].partition("<!-- end of gpu -->")[0]
    assert shown == table(COLUMNS, rows(recorded))
