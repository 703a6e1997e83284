"""The sentences of all recordings: few templates, each in use, and few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

import pytest

from fp8doctor.answer.sentences import TEMPLATES
from tests.replays import ALL, replayed

MOST_TEMPLATES = 40
MOST_WORDS = 110
USUAL_WORDS = 75

RARE = {"fix.off", "fix.stay", "sure.cpu", "open.question", "then.fp8", "then.range"}
"""Templates of jobs that no recording has, and the parts of a line of another template."""


def words(lines: Iterator[Any]) -> int:
    return sum(len(each.text.split()) for each in lines)


@pytest.mark.slow
def test_every_template_is_in_use_and_a_box_has_few_words() -> None:
    used, lengths = Counter[str](), []
    for path in ALL:
        found = replayed(path).screen.box
        used.update({each.template for each in found.lines})
        lengths.append(words(found.lines))
    assert len(TEMPLATES) <= MOST_TEMPLATES
    assert TEMPLATES.keys() - used.keys() <= RARE
    assert quantiles(lengths, n=20)[-1] <= MOST_WORDS
    assert median(lengths) <= USUAL_WORDS
