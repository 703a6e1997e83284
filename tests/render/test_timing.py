"""The table of steps with where the time goes, and the sentences under it; breakdowns composed in measured
proportions."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from fp8doctor.analysis.step_difference import PARTS, REST
from fp8doctor.diagnosis.next_step import more_time_s
from fp8doctor.facts import Arm, Facts, Family
from fp8doctor.facts.arm_names import Reason
from fp8doctor.render import text
from fp8doctor.render.terminal import columns
from fp8doctor.render.timing import COLUMNS, timing
from fp8doctor.render.words import variant_of
from fp8doctor.report import Report
from tests.checks.arms import ran, timed, too_late
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, replaced, unprofiled
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

TABLE = """\
  ms/step            FP8 matmul  other matmul  casts  attention  other  idle
  BF16 compiled               -          62.4      -       11.1   17.9   1.3
  FP8 as you run it        25.2           4.2  273.6       10.4   39.4  13.3
  FP8, compiled            32.1           4.2   23.7       10.1   15.1   3.1
  FP8, compiled, against BF16 compiled: −4.4 ms = matmuls −26.1, casts +21.0, idle GPU +1.8,
  attention −1.0, optimizer −0.1 ms (2.7 ms of norm and pointwise work runs inside the casts and is
  not counted as theirs).
"""
"""What the first screen does not say: the bars in numbers, and the second difference."""


def of(*arms: Arm, **trial: Any) -> Report:
    facts = timed(DECODER_468M, *arms)
    return report(
        msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, **trial)),
        "FP8 runs at 0.25x of BF16.",
    )


def notes(*arms: Arm, **trial: Any) -> tuple[str, ...]:
    found = timing(of(*arms, **trial).facts)
    assert found is not None
    return found.notes


def test_the_table_says_where_the_time_goes() -> None:
    assert TABLE in text.render(of(*ARMS), verbose=True)


def test_a_treatment_that_is_the_whole_prescription_has_one_row() -> None:
    alone = msgspec.structs.replace(ARMS[3], name="compile-blocks")
    other = ran("cache-off", 99.0, treatments=("cache-off",))
    rows = [
        row.label
        for row in (timing(timed(DECODER_468M, *ARMS, alone, other)) or pytest.fail("no table")).rows
    ]
    assert rows == [
        "BF16",
        "BF16 compiled",
        "FP8 as you run it",
        "FP8 with all fixes",
        "FP8 rowwise",
        "FP8, no KV cache",
    ]


@pytest.mark.parametrize("width", [40, 60, 79, 86, 87, 100, 140])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_asked(width: int, ascii: bool) -> None:
    screen = text.render(of(*ARMS), width=width, ascii=ascii, verbose=True)
    assert all(columns(line) <= width and line == line.rstrip() for line in screen.splitlines())


def test_there_is_nothing_to_note_where_the_parts_are_plain() -> None:
    assert notes(*ARMS) == ()


def test_unreliable_parts_are_called_so_and_explain_nothing() -> None:
    facts = of(replaced(FP8_EAGER, reliable=False, scale=1.4, busy_ms=512.5), BF16).facts
    found = timing(facts)
    assert found is not None
    assert found.differences == ()


def test_a_recipe_that_was_timed_by_block_says_so() -> None:
    arms = [
        Arm(name="compile-blocks", base="as_is", treatments=("compile-blocks",)),
        Arm(name="recipe-rowwise", base="compile-blocks", treatments=("recipe-rowwise",)),
    ]
    assert variant_of(arms[0], arms, True, {}) == "FP8, compiled"
    [*arms, Arm(name="bf16_as_compiled")]
    Arm(name="prescribed", base="as_is", treatments=("a", "b", "c"))


def test_a_model_without_fp8_has_the_difference_that_fp8_would_make() -> None:
    plain = tuple(
        msgspec.structs.replace(each, stack="torch", use="none") for each in DECODER_468M.network.linears
    )
    without: Facts = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=plain)
    )
    arms = (
        msgspec.structs.replace(BF16, name="as_is"),
        msgspec.structs.replace(FP8_COMPILED, name="float8_tensorwise", treatments=()),
    )
    found = timing(timed(without, *arms))
    assert found is not None


def test_every_family_has_its_column_and_its_part() -> None:
    assert sorted(family for families in COLUMNS.values() for family in families) == sorted(get_args(Family))
    assert {family for families in PARTS.values() for family in families} == set(get_args(Family)) - {
        "unknown"
    }
    assert REST == "unclassified"


WIDE = ("recipe-rowwise", "recipe-rowwise-with-gw-hp")


def waiting(*names: str) -> tuple[Arm, ...]:
    return tuple(too_late(name, name) for name in names)


def test_what_the_budget_left_no_time_for_stands_in_one_line_and_how_to_time_it_below() -> None:
    found = timing(of(*ARMS[:-1], *waiting(*WIDE, "fused-optimizer"), budget_s=60.0).facts)
    assert found is not None
    assert more_time_s(of(*ARMS[:-1], *waiting(*WIDE), budget_s=60.0).facts.trial) == 120.0
    assert more_time_s(of(*ARMS[:-1], budget_s=60.0).facts.trial) is None
    known = of(*ARMS[:-1], *waiting(*WIDE), budget_s=60.0, elapsed_s=118.0, enough_s=90.0)
    assert more_time_s(known.facts.trial) == 90.0


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
