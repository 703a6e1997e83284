"""The page's tables are what this version says of the twenty threads; a change shows here."""

from __future__ import annotations

import pytest

from research.complaints.unseen import MARK, misses, name_of
from research.complaints.unseen_adapters import OUTCOMES, PAGE, THREADS, row
from tests.markdown import table

BY_NAME = {name_of(each): each for each in THREADS}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_outcome_is_the_recorded_one(name: str) -> None:
    _, _, line = table(("",) * 4, [row(BY_NAME[name])]).splitlines()
    assert line in PAGE.read_text("utf-8").partition(MARK)[2].splitlines()


def test_the_set_is_whole() -> None:
    """Twenty threads, each with an outcome of the first run and, unless it was right, a reason."""
    assert len(BY_NAME) == 20
    assert {each["first"] for each in THREADS} <= set(OUTCOMES)
    assert all((each["first"] == "right") != ("why" in each) for each in THREADS)
    assert misses(THREADS) in PAGE.read_text("utf-8")
