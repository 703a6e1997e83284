"""An estimated saving, the step with the fix and its ratio to BF16 are one computation on every screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.analysis.no_estimate import LACKS, no_model_of
from fp8doctor.diagnosis.giving_up import planned_speedup, stays_in_bf16
from fp8doctor.diagnosis.planned_gain import planned_gain
from fp8doctor.facts import if_recorded
from fp8doctor.registry import discover
from fp8doctor.render.causes import estimate_told
from tests.diagnosis.test_plan_agrees import EVERY, TESTS, replayed
from tests.recordings import files, name_of
from tests.render.test_reasons import ESTIMATED, number

SAVES = re.compile(r"saves ([\d,.]+)(?: to ([\d,.]+))? ms/step, estimated")
SHARDED = [*files(TESTS / "sharded" / "recorded")]
FASTER = re.compile(r"(?:[Aa]bout )?([\d.]+)x(?: to ([\d.]+)x)? faster than now")


def about(ms: float) -> float:
    """How far two shown numbers may be apart: each has two digits, or one after the point."""
    return max(0.6, 0.05 * abs(ms))


@EVERY
def test_now_less_the_saving_is_the_step_that_the_ratio_gives(path: Path) -> None:
    report, screen, _ = replayed(path)
    expects = estimate_told(report)
    told = ESTIMATED.match(screen.answer.why[0]) if screen.answer.why and expects else None
    gains = if_recorded(planned_gain, report.facts, report.findings, report.prescription)
    if told is None or expects is None or expects.is_of_another_step or expects.recipes or gains is None:
        return
    now, bf16 = number(told[1]), number(told[2])
    found = next(filter(None, (SAVES.search(fix.aside) for fix in screen.fixes)), None)
    assert found, "the plan has a gain, and a fix that gives it"
    least, most = number(found[1]), number(found[2] or found[1])
    planned = planned_speedup(report.facts, report.findings, report.prescription)
    low, high = expects.now_bounds if stays_in_bf16(report.prescription) else planned.best_bounds
    ends = (
        (now * low, now * min(high, 1)) if stays_in_bf16(report.prescription) else (bf16 / high, bf16 / low)
    )
    assert now - most == pytest.approx(ends[0], abs=about(most))
    assert now - least == pytest.approx(ends[1], abs=about(least) + gains.may_keep_ms)


@EVERY
def test_faster_than_now_lies_in_the_saving(path: Path) -> None:
    report, screen, _ = replayed(path)
    gains = if_recorded(planned_gain, report.facts, report.findings, report.prescription)
    faster = FASTER.search(screen.answer.then.sentence)
    found = next(filter(None, (SAVES.search(fix.aside) for fix in screen.fixes)), None)
    if gains and faster and found and report.verdict.basis != "measured":
        low, high = float(faster[1]), float(faster[2] or faster[1])
        least, most = number(found[1]), number(found[2] or found[1])
        assert least - about(least) <= gains.now_ms * (1 - 1 / low)
        assert gains.now_ms * (1 - 1 / high) <= most + about(most)


@EVERY
def test_staying_in_bf16_saves_no_kernels_alone(path: Path) -> None:
    """What a check counts of some layers' kernels leaves the host out."""
    report, _, _ = replayed(path)
    gains = if_recorded(planned_gain, report.facts, report.findings, report.prescription)
    if stays_in_bf16(report.prescription) and report.verdict.basis != "measured":
        estimated = [each.saving_ms for each in report.prescription if each.saving_ms]
        assert not estimated or (gains and gains.saving in estimated)


@EVERY
def test_an_unknown_gain_has_its_reason(path: Path) -> None:
    _, screen, _ = replayed(path)
    told = " ".join(
        [*(each for _, row in screen.answer.rows for each in row), screen.answer.numbers, screen.answer.what]
    )
    assert "was not estimated" not in told
    for reason in re.findall(r"No estimate[^:.]*(.)", told):
        assert reason == ":"
    if "no estimate as it is" in told:
        assert re.search(r"no cost model for|No estimate as it is: ", told)


@EVERY
def test_a_ceiling_is_called_one_and_is_not_measured(path: Path) -> None:
    report, screen, _ = replayed(path)
    asides = [*(fix.aside for fix in screen.fixes), screen.answer.then.sentence]
    assert not any("saves 0.0 to" in each or "up to" in each for each in asides)
    for each in (*report.findings, *report.prescription):
        if each.saving_ms and each.saving_ms.low == 0 < each.saving_ms.high:
            assert each.saving_ms.basis == "modelled"


@EVERY
def test_all_fixes_are_never_all_but_one(path: Path) -> None:
    _, screen, _ = replayed(path)
    assert not re.search(r"With all fixes.*; without fix", screen.answer.then.sentence)


def test_every_area_names_what_the_cost_model_lacks() -> None:
    for check in discover():
        assert check.code in LACKS or check.code[:3] in LACKS, check.code
        assert "this change" not in no_model_of([check.code])


@EVERY
def test_the_parts_of_the_fixed_step_name_the_fixes_of_then(path: Path) -> None:
    _, screen, _ = replayed(path)
    why, then = " ".join(screen.answer.why), screen.answer.then.sentence
    parts = re.search(r"With ([^,.]*fix[^,.]*), FP8 would take", why)
    promise = re.search(r"With ([^:.]*fix[^:.]*): ", then)
    if parts and promise:
        assert parts[1].replace("the fix", "this fix") == promise[1]


@EVERY
def test_the_answer_names_only_fixes_that_it_lists(path: Path) -> None:
    _, screen, _ = replayed(path)
    answer = screen.answer
    listed = len(re.findall(r"(?:^|\s)\d\. [A-Z]", "\n".join(answer.fix))) or len(screen.fixes[:1])
    told = " ".join((*answer.why, answer.then.sentence, answer.limit, answer.sure))
    named = [int(each) for each in re.findall(r"\b[Ff]ix(?:es)? (\d)", told)]
    assert max(named, default=1) <= max(listed, 1)
    assert "all fixes" not in told or listed > 1


@EVERY
def test_sure_and_then_are_about_the_same_fixes(path: Path) -> None:
    _, screen, _ = replayed(path)
    promise = re.search(r"With (fix(?:es)? [\d, and]+): about", screen.answer.then.sentence)
    sure = re.search(r"(?:Faster|Slower) with ([^:]*fix[^:]*): ", screen.answer.sure)
    if promise and sure:
        assert promise[1] == sure[1]


@pytest.mark.parametrize("path", SHARDED, ids=name_of)
def test_communication_is_saved_from_the_whole_step(path: Path) -> None:
    """A copy has none: its compute does not get shorter."""
    _, screen, _ = replayed(path)
    then = screen.answer.then.sentence
    exposed = re.search(r"communication takes [\d.]+ of ([\d.,]+) ms/step", " ".join(screen.answer.why))
    if exposed and then.startswith("Compute alone") and "ms/step less than" in then:
        assert f"less than the whole step, {exposed[1]} ms now" in then


@pytest.mark.parametrize("path", SHARDED, ids=name_of)
def test_a_fix_of_communication_is_an_action(path: Path) -> None:
    report, _, _ = replayed(path)
    for step in report.prescription:
        if step.code == "DST005":
            assert re.search("larger batch per GPU|[Pp]refetch|no_sync", step.treatment.summary)


@pytest.mark.parametrize("path", SHARDED, ids=name_of)
def test_a_larger_batch_is_compared_by_its_tokens(path: Path) -> None:
    """Twice the tokens take longer; the time on screen does not."""
    report, screen, _ = replayed(path)
    timed = any(each.tried and each.get("tokens_ratio", 1) > 1 for each in report.facts.arms())
    assert ("for as many tokens as the others'" in screen.method) == timed
