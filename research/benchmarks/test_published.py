"""Every published job beside its plan."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

import pytest

from fp8doctor.analysis.modelled_speedup import OFF_ON
from research.benchmarks import published
from research.benchmarks.published import Replayed, by_group, jobs, parts, replay

RESULTS = Path(published.__file__).parent / "results" / "published.md"


@pytest.fixture(scope="module")
def rows() -> list[Replayed]:
    return [replay(job) for job in jobs()]


def test_published_training_keeps_the_targets(rows: list[Replayed]) -> None:
    missed = published.missed(rows, published.pairs([*rows, *published.replayed_parts()]))
    said = RESULTS.read_text("utf-8").rstrip().rpartition("\n")[2]
    assert said == (f"Missed: {'; '.join(missed)}." if missed else "Every target held.")
    assert not missed


def test_the_ranges_are_those_of_the_results(rows: list[Replayed]) -> None:
    lines = {tuple(each.split()) for each in RESULTS.read_text("utf-8").splitlines()}
    for line in published.summaries(rows):
        assert tuple(" | ".join(("", *line, "")).split()) in lines, line
    for (stack, granularity, gpus), off in OFF_ON.items():
        held = [
            row
            for row in rows
            if (published.STACKS[row.stack], row.granularity, row.label[3]) == (stack, granularity, gpus)
            and row.group not in published.EXPLAINED
        ]
        assert all(abs(row.error) <= off for row in held), (stack, granularity, gpus)
        if held and gpus != "Hopper":
            assert off >= 3 * max(by_group(held, lambda row: abs(row.error))), (stack, granularity, gpus)
    assert statistics.mean(by_group(rows, lambda row: row.is_in_range)) > published.IN_RANGE


def test_every_published_row_is_planned_or_has_a_reason() -> None:
    rest = [name for each in published.published()["not_expressed"] for name in each["ids"]]
    names = Counter([*(job["id"] for job in jobs()), *(part["id"] for part in parts()), *rest])
    assert sum(names.values()) == len(names) == 134
    assert all(each["why"] and each["source"] for each in published.published()["not_expressed"])


def test_published_matmuls_are_near() -> None:
    """Casts of a single forward hold the host's time as well, so they are not held to anything."""
    for part in published.replayed_parts():
        if not part.what.startswith("forward"):
            assert abs(part.error) < 0.10, part
            assert abs(part.modelled_bf16_ms / part.bf16_ms - 1) < 0.06, part
