"""The page's table is what this version says of each rebuilt thread; a change shows here."""

from __future__ import annotations

import pytest

from research.complaints.replay import MARK, NAMES, PAGE, complaint, replayed, row
from tests.markdown import table


@pytest.mark.parametrize("name", NAMES)
def test_the_outcome_is_the_recorded_one(name: str) -> None:
    _, _, line = table(("",) * 7, [row(name)]).splitlines()
    assert line in PAGE.read_text("utf-8").partition(MARK)[2].splitlines()


def test_every_thread_is_its_own() -> None:
    assert len(NAMES) == len({complaint(name).THREAD for name in NAMES}) == 25


def test_more_tokens_are_promised_what_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as it is loses by its host; that is no reason to leave FP8 off if the plan ends it."""
    compared = replayed(complaint("te_836"), monkeypatch).answer.compared
    assert compared.end_speedup.value == pytest.approx(1.12, abs=0.005)
