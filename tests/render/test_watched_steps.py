"""A screen that estimates a watched job agrees with the step that it watched."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from fp8doctor.analysis.modelled_speedup import to_convert
from fp8doctor.analysis.rank_comparison import PARTS, exposed_ms, exposed_of_ranks, late_ms, timed_ranks
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, traits
from fp8doctor.analysis.waiting import script_overhead
from fp8doctor.analysis.watched_speedup import watched_ms
from fp8doctor.cost import micro_batches, step_tokens
from fp8doctor.diagnosis.expected_verdict import expected_speedup
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.render.step_parts import estimate_told
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
    bf16 = re.search(r"FP8 takes [\d.,]+ ms/step, (?:compiled )?BF16 would take about ([\d.,]+)", told)
    now = re.search(r"estimated ([\d.]+)x|As it is: about ([\d.]+)x|FP8 (?:compute )?runs at ([\d.]+)x", told)
    if step_ms and bf16 and now:
        shown = float(next(filter(None, now.groups())))
        assert shown == pytest.approx(float(bf16[1].replace(",", "")) / step_ms, rel=ROUNDED, abs=0.006)


@EVERY
def test_a_gain_over_a_watched_step_ends_in_the_estimated_step(path: Path) -> None:
    """Both ratios of a promise have the same end, and the first begins at the watched step."""
    told, step_ms = said(path)
    report, _, _ = replayed(path)
    promise = re.search(
        r"about (?:[\d.]+x to )?([\d.]+)x faster than now, about ([\d.]+)x the speed of the best BF16", told
    )
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
def test_a_rank_computes_and_communicates_within_its_step(path: Path) -> None:
    """A profiled step is longer than the timed ones; what it waits longer is no part of those."""
    report, _, _ = replayed(path)
    ranks = timed_ranks(report.facts) if recorded(report.facts, "ranks") else ()
    for observed in (each.observed for each in ranks):
        if alone := if_recorded(exposed_ms, observed):
            computes = PARTS["of its GPU's computing"](observed)
            assert alone + computes <= median(observed.steps_ms) + 0.01


@EVERY
def test_bf16_communicates_as_the_rank_that_waits_for_no_other(path: Path) -> None:
    """BF16 waits for a slower rank too, if FP8 is not what slows it down."""
    _, step_ms = said(path)
    report, _, _ = replayed(path)
    exposed = if_recorded(exposed_of_ranks, report.facts) if step_ms else None
    if exposed:
        alone = expected_speedup(report.facts, report.findings, as_it_ran=False)
        ran = expected_speedup(report.facts, report.findings)
        if alone and ran and alone.parts and ran.parts:
            shared = min(exposed) + if_recorded(late_ms, report.facts)
            assert ran.parts.bf16_ms == pytest.approx(min(alone.parts.bf16_ms + shared, ran.parts.bf16_ms))
            assert ran.parts.bf16_ms == pytest.approx(alone.parts.bf16_ms + shared) or ran.recipes


@EVERY
def test_parts_that_were_profiled_are_not_estimated(path: Path) -> None:
    told, step_ms = said(path)
    report, _, _ = replayed(path)
    divided = re.search(r"FP8 takes [^:]* BF16 would take about [^:]*: ([^.]*\.\d[^:]*?)\. ", f"{told} ")
    if not step_ms or not divided or not recorded(report.facts, "observed.breakdown.families_ms"):
        return
    profile = report.facts.observed.breakdown
    parts = dict(re.findall(r"([a-zA-Z ]+?) ([+−][\d.,]+)", divided[1]))
    parts = {name.strip(): float(ms.replace("−", "-").replace(",", "")) for name, ms in parts.items()}
    assert parts.get("casts", 0.0) == pytest.approx(
        profile.scale * profile.families_ms.get("cast", 0), abs=0.06
    )
    if profile.idle_ms > 0.1 * step_ms and not late_ms(report.facts):
        assert 0 < parts["idle GPU"] <= profile.idle_ms + 0.06


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
        assert "Compute alone: " in screen.answer.sure or "That is of compute" in screen.answer.sure
        if (verdict.whole_step_low or 0.0) < 1 < verdict.whole_step_high:
            finds = [each for each in screen.answer.fix if "fp8doctor run" in each]
            assert "To find the whole step" in "".join(finds), "the command that finds it out"
            assert "fp8doctor run" not in screen.answer.sure


LEFT_OUT = r"([\d,.]+) ms (?:of the step as it ran are in|too\.)"
"""Time that BF16 may take too, in a sentence of its own or behind the same number."""


@EVERY
def test_time_in_no_estimate_may_be_in_bf16_too(path: Path) -> None:
    """It is why the range goes further than the ratio of the two times."""
    report, _, _ = replayed(path)
    told, _ = said(path)
    expects, left_out = estimate_told(report), re.search(LEFT_OUT, told)
    if expects and expects.describes_no_watched_step and expects.left_out_ms:
        assert left_out, "the step is longer than its estimate"
        assert float(left_out[1].replace(",", "")) == pytest.approx(expects.left_out_ms, abs=0.06)
        assert "where the estimate has" in told


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_job_that_ran_with_a_fault_has_a_speed_as_it_is(path: Path) -> None:
    report, screen, _ = replayed(path)
    expects = if_recorded(expected_speedup, report.facts, report.findings)
    if (
        report.verdict.status == "layers_do_not_learn"
        and expects
        and expects.ran_ms
        and not report.facts.arms()
    ):
        low, high = expects.now_bounds or (0.0, 0.0)
        assert f"as it is: likely, {low:.2f} to {high:.2f}x the speed of BF16" in screen.answer.sure


@EVERY
def test_an_answer_that_the_estimate_leaves_open_has_the_command_that_times_both(path: Path) -> None:
    told, step_ms = said(path)
    if step_ms and " to tell whether FP8 is" in told:
        assert "run --stop" in told


@EVERY
def test_too_close_is_said_only_of_what_is_close(path: Path) -> None:
    told, _ = said(path)
    speed = re.search(r"estimated ([\d.]+)x|would be about ([\d.]+)x", told)
    if "Too close" in told and speed:
        assert float(next(filter(None, speed.groups()))) == pytest.approx(1, abs=0.35)
        assert "does not describe" not in told


@EVERY
def test_a_step_without_fp8_was_timed_in_bf16(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.status in ("no_fp8", "fp8_not_engaged"):
        assert "BF16 was not" not in screen.answer.sure


@EVERY
def test_idle_time_is_promised_away_only_as_the_best_case(path: Path) -> None:
    """What the model cannot explain of a step may stay, as long as the GPU is idle."""
    told, step_ms = said(path)
    report, _, _ = replayed(path)
    promise = re.search(r"[Aa]bout (?:([\d.]+)x to )?([\d.]+)x faster than now", told)
    if not step_ms or not promise or not recorded(report.facts, "observed.breakdown.idle_ms"):
        return
    idle_ms, least = report.facts.observed.breakdown.idle_ms, float(promise[1] or promise[2])
    expects = expected_speedup(report.facts, report.findings)
    if expects is not None and expects.parts and idle_ms > 0.1 * step_ms:
        unknown_ms = step_ms - expects.modelled_ms if expects.modelled_ms else idle_ms
        assert step_ms / least >= min(idle_ms, max(0.0, unknown_ms))


@EVERY
def test_only_the_scripts_own_step_is_as_you_run_it(path: Path) -> None:
    """A copy does not run as the script does: it has no data, no logging and no other rank."""
    report, screen, _ = replayed(path)
    steps = report.facts.get("observed.steps_ms") if report.facts.arms() else None
    if not steps:
        return
    answer = screen.answer
    told = " ".join((answer.what, answer.numbers, *answer.why, *answer.fix, answer.then.sentence))
    assert "as you run it" not in told
    assert not [each.label for each in screen.variants if "as you run it" in each.label]
    rate = next((line for name, line in screen.facts if name == "Tokens/s"), "")
    tokens = step_tokens(report.facts)
    if rate and tokens:
        own = tokens * micro_batches(report.facts) / median(steps) * 1e3
        assert float(rate.split()[0].replace(",", "")) == pytest.approx(own, rel=0.001)


@EVERY
def test_a_copy_far_shorter_than_its_script_is_called_compute(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.basis == "measured" and if_recorded(script_overhead, report.facts):
        assert re.search(r"FP8 compute .*; the whole step |^The timing is too noisy", screen.answer.what)
