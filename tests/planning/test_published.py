"""Plans of published jobs: every row in the whole, the cheap ones in the gate."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from research.benchmarks import published
from research.benchmarks.published import jobs, parts, replay

RESULTS = Path(published.__file__).parent / "results" / "published.md"

CHEAP = [job for job in jobs() if job["model"] == "llama-8b"]


def test_every_published_row_is_planned_or_has_a_reason() -> None:
    rest = [name for each in published.published()["not_expressed"] for name in each["ids"]]
    names = Counter([*(job["id"] for job in jobs()), *(part["id"] for part in parts()), *rest])
    assert sum(names.values()) == len(names) == 134
    assert all(each["why"] and each["source"] for each in published.published()["not_expressed"])


@pytest.mark.parametrize("job", CHEAP, ids=lambda job: job["id"])
def test_the_range_of_a_published_8b_contains_what_was_published(job: dict[str, object]) -> None:
    row = replay(job)
    assert row.is_in_range, row
    assert row.has_right_sign
    assert row.low < row.modelled < row.high


def test_published_matmuls_are_near() -> None:
    """Casts of a single forward hold the host's time as well, so they are not held to anything."""
    for part in published.replayed_parts():
        if not part.what.startswith("forward"):
            assert abs(part.error) < 0.10, part
            assert abs(part.modelled_bf16_ms / part.bf16_ms - 1) < 0.06, part
