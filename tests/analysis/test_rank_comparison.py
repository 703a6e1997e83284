"""The steps of recorded ranks: each computes and communicates within its own, and BF16 waits as FP8 does."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from fp8doctor.analysis.watched import PARTS, exposed_ms, exposed_of_ranks, late_ms, timed_ranks
from fp8doctor.diagnosis.estimate import expected_speedup
from fp8doctor.facts import if_recorded
from tests.replays import ALL, replayed

RUNNING = Path(__file__).parents[1] / "running" / "recorded"
WATCHED = (
    "ddp_slow_rank",
    "ddp_te_delayed",
    "ddp_torchao_compiled_whole",
    "ddp_torchao_eager",
    "ddp_uneven_steps",
    "fsdp1_torchao",
    "fsdp2_bf16_all_gather",
    "fsdp2_few_rows",
    "fsdp2_float8_all_gather",
    "fsdp2_without_precompute",
)
"""Jobs of two ranks whose step was watched and is estimated."""


def test_no_rank_computes_and_communicates_longer_than_its_step() -> None:
    """A profiled step is longer than the timed ones; what it waits longer is no part of those."""
    watched = [
        each.observed
        for path in ALL
        if "x2-" in path.name
        for each in timed_ranks(replayed(path).report.facts)
        if if_recorded(exposed_ms, each.observed)
    ]
    assert len(watched) == 38
    for each in watched:
        computes = sum(PARTS["of its GPU's computing"](each))
        assert exposed_ms(each) + computes <= median(each.steps_ms) + 0.01


@pytest.mark.parametrize("name", WATCHED)
def test_bf16_communicates_as_the_rank_that_waits_for_no_other(name: str) -> None:
    """BF16 waits for a slower rank too, if FP8 is not what slows it down."""
    report = replayed(RUNNING / f"h200x2-{name}.json.gz").report
    alone = expected_speedup(report.facts, report.findings, as_it_ran=False)
    ran = expected_speedup(report.facts, report.findings)
    assert alone is not None
    assert ran is not None
    shared = min(exposed_of_ranks(report.facts)) + (if_recorded(late_ms, report.facts) or 0.0)
    both = alone.bf16_ms + shared
    assert ran.bf16_ms <= both + 1e-6 if ran.recipes else ran.bf16_ms == pytest.approx(both)
