"""The steps of recorded ranks: each computes and communicates within its own, and BF16 waits as FP8 does."""

from pathlib import Path
from statistics import median

import pytest

from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.watched import PARTS, exposed_ms, exposed_of_ranks, late_ms, timed_ranks
from fp8doctor.answer.verdict import invalidates
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.facts import if_recorded
from tests.replays import ALL, replayed

RUNNING = Path(__file__).parents[1] / "running" / "recorded"


def test_no_rank_computes_and_communicates_longer_than_its_step() -> None:
    """A profiled step is longer than the timed ones; what it waits longer is no part of those."""
    watched = [
        each.observed
        for path in ALL
        if "x2-" in path.name
        for each in timed_ranks(replayed(path).report.facts)
        if if_recorded(exposed_ms, each.observed)
    ]
    assert len(watched) == 44
    for each in watched:
        computes = sum(PARTS["of its GPU's computing"](each))
        assert exposed_ms(each) + computes <= median(each.steps_ms) + 0.01


def test_bf16_communicates_as_the_rank_that_waits_for_no_other() -> None:
    """BF16 waits for a slower rank too, if FP8 is not what slows it down."""
    held = 0
    for path in RUNNING.glob("h200x2-*.json.gz"):
        report = replayed(path).report
        exposed = exposed_of_ranks(report.facts)
        fixed = any(map(invalidates, report.findings))
        ran = Expected(report.facts, report.findings).now
        alone = if_recorded(modelled_speedup, report.facts, fixed=fixed)
        if exposed and alone and ran:
            both = alone.bf16_ms + min(exposed) + (if_recorded(late_ms, report.facts) or 0.0)
            if ran.recipes:  # its own BF16 was timed
                assert both - 1e-6 <= ran.bf16_ms <= ran.ran_ms + 1e-6, path
            else:
                assert ran.bf16_ms == pytest.approx(both), path
            held += 1
    assert held >= 10
