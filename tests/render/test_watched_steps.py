"""A screen that estimates a watched job agrees with the step that it watched."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from fp8doctor.analysis.modelled_speedup import to_convert, watched_ms
from fp8doctor.analysis.rank_comparison import exposed_ms
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, traits
from fp8doctor.analysis.waiting import script_overhead
from fp8doctor.diagnosis.expected_verdict import expected_speedup
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.render.causes import estimate_told
from tests.diagnosis.test_plan_agrees import ALL, TESTS, replayed
from tests.recordings import files, name_of

SHARDED = files(TESTS / "sharded" / "recorded")
PATHS = [*ALL, *SHARDED]
EVERY = pytest.mark.parametrize("path", PATHS, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in PATHS])

ROUNDED = 0.02
"""Relative error of a ratio that is printed to two digits after the point, or one."""


def said(path: Path) -> tuple[str, float | None]:
    """Return all sentences of an estimated answer, and the watched step that it is of."""
    report, screen, _ = replayed(path)
    if not recorded(report.facts, "network") or not estimate_told(report):
        return "", None
    told = " ".join(
        (screen.answer.what, screen.answer.numbers, *(" ".join(each) for _, each in screen.answer.rows))
    )
    return told, watched_ms(report.facts)


@EVERY
def test_fp8_is_worth_its_estimated_bf16_over_the_watched_step(path: Path) -> None:
    told, step_ms = said(path)
    bf16 = re.search(r"FP8 takes [\d.,]+ ms/step, BF16 would take about ([\d.,]+)", told)
    now = re.search(r"estimated ([\d.]+)x|As it is: about ([\d.]+)x|FP8 (?:compute )?runs at ([\d.]+)x", told)
    if step_ms and bf16 and now:
        shown = float(next(filter(None, now.groups())))
        assert shown == pytest.approx(float(bf16[1].replace(",", "")) / step_ms, rel=ROUNDED, abs=0.006)


@EVERY
def test_a_gain_over_a_watched_step_ends_in_the_estimated_step(path: Path) -> None:
    """Both ratios of a promise have the same end, and the first begins at the watched step."""
    told, step_ms = said(path)
    report, _, _ = replayed(path)
    promise = re.search(r"about ([\d.]+)x faster than now, about ([\d.]+)x the speed of the best BF16", told)
    expects = if_recorded(expected_speedup, report.facts, report.findings) if promise else None
    if promise and step_ms and expects and expects.parts:
        ends = step_ms / float(promise[1]), expects.parts.bf16_ms / float(promise[2])
        assert ends[0] == pytest.approx(ends[1], rel=2 * ROUNDED)


@EVERY
def test_no_typical_error_beside_an_estimate_that_its_step_refutes(path: Path) -> None:
    told, step_ms = said(path)
    if where := re.search(r"takes ([\d.,]+) ms where the estimate has ([\d.,]+)", told):
        assert "in the median" not in told
        assert float(where[1].replace(",", "")) == pytest.approx(step_ms, abs=0.1)
    report, _, _ = replayed(path)
    expects = expected_speedup(report.facts, report.findings) if step_ms else None
    if expects and expects.as_is and expects.modelled_ms and not expects.recipes and "in the median" in told:
        assert abs(expects.modelled_ms / step_ms - 1) <= expects.as_is_may_be_off


@EVERY
def test_bf16_has_the_communication_of_the_job(path: Path) -> None:
    """A watched step holds its communication, so the BF16 step beside it does too."""
    _, step_ms = said(path)
    report, _, _ = replayed(path)
    exposed = if_recorded(exposed_ms, report.facts.observed) if step_ms else None
    if exposed:
        alone = expected_speedup(report.facts, report.findings, as_it_ran=False)
        ran = expected_speedup(report.facts, report.findings)
        if alone and ran and alone.parts and ran.parts:
            assert ran.parts.bf16_ms == pytest.approx(alone.parts.bf16_ms + exposed)
            assert median(report.facts.observed.steps_ms) == step_ms


@EVERY
def test_a_promise_of_compiled_fp8_has_a_fix_that_compiles(path: Path) -> None:
    """The estimate of a conversion is of compiled layers."""
    report, screen, _ = replayed(path)
    expects = expected_speedup(report.facts, report.findings) if recorded(report.facts, "network") else None
    if expects is None or not expects.recipes or screen.answer.then.basis != "modelled":
        return
    layers = to_convert(report.facts)
    compiled = bool(layers) and all(each.compiled is not None for each in layers)
    plan = [step.treatment for step in report.prescription]
    compiles = any(traits(each.name).compiles or ".compile(" in each.code for each in plan)
    if not compiled and not compiles and STAY_IN_BF16 not in {each.name for each in plan}:
        assert f"{expects.best:.2f}x" not in screen.answer.then.sentence
        assert "faster than now" not in screen.answer.then.sentence


@EVERY
def test_nothing_found_is_not_said_beside_other_work_that_costs_most(path: Path) -> None:
    _, screen, _ = replayed(path)
    told = " ".join((*screen.answer.why, *screen.answer.fix))
    numbers = r"BF16 (?:would take about )?([\d,.]+) .*?casts \+([\d,.]+), other work \+([\d,.]+?)\.(?: |$)"
    parts = re.search(numbers, told)
    if parts and "No check found" in told:
        bf16_ms, casts_ms, other_ms = (float(each.replace(",", "")) for each in parts.groups())
        assert other_ms <= max(casts_ms, 0.03 * bf16_ms)


@EVERY
def test_a_script_whose_step_is_longer_than_its_copy_says_so_in_the_box(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.basis == "measured" and if_recorded(script_overhead, report.facts):
        assert f"{median(report.facts.observed.steps_ms):,.1f} ms" in screen.answer.limit


@EVERY
def test_times_of_copies_beside_a_whole_step_are_called_compute(path: Path) -> None:
    report, screen, _ = replayed(path)
    verdict = report.verdict
    if verdict.basis == "measured" and verdict.whole_step_high:
        assert screen.answer.then.sentence.startswith("Compute alone")
        assert "compute" in screen.answer.sure
        if (verdict.whole_step_low or 0.0) < 1 < verdict.whole_step_high:
            assert "fp8doctor run" in screen.answer.sure, "the command that finds it out"
