"""The sentences of all recordings: few templates, each in use, and few words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fp8doctor.answer.sentences import TEMPLATES
from tests.replays import ALL, case, replayed
from tests.sentences import PAGE, counted, page

MOST_TEMPLATES = 40
MOST_WORDS = 110
USUAL_WORDS = 75


@pytest.mark.parametrize("path", ALL, ids=case)
def test_a_box_says_a_time_once(path: Path) -> None:
    """Causes aside, which checks name."""
    times = [
        ms
        for each in replayed(path).box.lines
        if not each.template.startswith("why.")
        for ms in re.findall(r"[\d,]+\.\d(?= ms)", each.text)
    ]
    assert len(times) == len({*times})


def words(lines: Iterator[Any]) -> int:
    return sum(len(each.text.split()) for each in lines)


@pytest.mark.slow
def test_every_template_is_in_use_and_a_box_has_few_words() -> None:
    lengths = [words(replayed(path).box.lines) for path in ALL]
    used = counted()
    assert page(used) == PAGE.read_text("utf-8"), "python -m tests.refresh sentences"
    assert len(TEMPLATES) <= MOST_TEMPLATES
    assert min(used[name] for name in TEMPLATES) >= 3
    assert max(lengths) <= MOST_WORDS
    assert median(lengths) <= USUAL_WORDS
