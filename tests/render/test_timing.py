"""The table of steps with where the time goes, and the sentences under it; breakdowns composed in measured
proportions."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from fp8doctor.analysis.step_difference import PARTS, REST
from fp8doctor.answer.commands import more_time_s
from fp8doctor.facts import Arm, Family
from fp8doctor.facts.arm_names import Reason
from fp8doctor.render.timing import COLUMNS
from fp8doctor.report import Report
from tests.checks.arms import timed, too_late
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, unprofiled
from tests.facts_of import DECODER_468M
from tests.render.reports import report


def shown(arm: Arm, gib: float) -> Arm:
    assert arm.step_ms is not None
    return msgspec.structs.replace(arm, low_ms=arm.step_ms - 0.4, high_ms=arm.step_ms + 0.4, peak_gib=gib)


ARMS = (
    shown(FP8_EAGER, 24.7),
    shown(unprofiled("bf16", 103.6), 24.7),
    shown(BF16, 21.7),
    shown(FP8_COMPILED, 17.2),
    too_late("recipe-rowwise"),
)


def of(*arms: Arm, **trial: Any) -> Report:
    facts = timed(DECODER_468M, *arms)
    return report(msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, **trial)))


def test_every_family_has_its_column_and_its_part() -> None:
    assert sorted(family for families in COLUMNS.values() for family in families) == sorted(get_args(Family))
    assert {family for families in PARTS.values() for family in families} == set(get_args(Family)) - {
        "unknown"
    }
    assert REST == "unclassified"


WIDE = ("recipe-rowwise", "recipe-rowwise-with-gw-hp")


def waiting(*names: str) -> tuple[Arm, ...]:
    return tuple(too_late(name, name) for name in names)


@pytest.mark.parametrize(
    ("budget_s", "elapsed_s", "advised"),
    [(0.5, 3.0, 30), (0.001, 0.1, 30), (10.0, 13.0, 30), (60.0, 90.0, 150)],
)
def test_the_budget_that_is_advised_is_more_than_the_trial_took(
    budget_s: float, elapsed_s: float, advised: int
) -> None:
    short = of(*ARMS[:-1], *waiting(*WIDE), budget_s=budget_s, elapsed_s=elapsed_s)
    assert more_time_s(short.facts.trial) == advised


def test_a_trial_that_timed_nothing_in_time_advises_more() -> None:
    trial = msgspec.structs.replace(of(*ARMS, budget_s=60.0).facts.trial, arms=())
    late, raising = (
        msgspec.structs.replace(trial, why=why, reason="")
        for why in (Reason.NO_TIME_LEFT, Reason.STEP_RAISES)
    )
    assert (more_time_s(late), more_time_s(raising)) == (120.0, None)
