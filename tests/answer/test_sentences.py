"""The sentences of all recordings: few templates, each in use, and few words."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

import pytest

from fp8doctor.answer.sentences import TEMPLATES
from tests.replays import ALL, replayed
from tests.sentences import PAGE, counted, page

MOST_TEMPLATES = 40
MOST_WORDS = 110
USUAL_WORDS = 75

RARE = {"fix.off", "sure.cpu", "open.question"}
"""Templates of jobs that no recording has."""


def words(lines: Iterator[Any]) -> int:
    return sum(len(each.text.split()) for each in lines)


@pytest.mark.slow
def test_every_template_is_in_use_and_a_box_has_few_words() -> None:
    lengths = [words(replayed(path).screen.box.lines) for path in ALL]
    used = counted()
    assert page(used) == PAGE.read_text("utf-8"), "python -m tests.refresh sentences"
    assert len(TEMPLATES) <= MOST_TEMPLATES
    assert TEMPLATES.keys() - used.keys() <= RARE
    assert quantiles(lengths, n=20)[-1] <= MOST_WORDS
    assert median(lengths) <= USUAL_WORDS
