"""Why on a recorded screen gives the reason of the headline, in parts that add up; a fault stands behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import traits
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.render.causes import IDLE, state_now
from fp8doctor.render.ended_ranks import ended_rank
from fp8doctor.render.step_parts import estimate_told
from fp8doctor.render.timing import as_is_difference
from tests.diagnosis.test_plan_agrees import EVERY, replayed

MEASURED = re.compile(r"FP8 (?:takes|would take) ([\d,.]+) ms/step (longer|less)(?:, [\w ]+)?: (.+)\.$")
ESTIMATED = re.compile(
    r"FP8 (?:takes|would take) (?:about )?([\d,.]+) ms/step, (?:compiled )?BF16 (?:would take about )?"
    r"([\d,.]+) \(estimated\): (.+?\d)\.(?= |$)"
)
TITLE = re.compile(r"FP8 .*about ([\d.]+)x (faster|slower)")


def number(told: str) -> float:
    return float(told.replace(",", "").replace("−", "-"))


def total(parts: str) -> float:
    return sum(map(number, re.findall(r"[−+][\d,]+\.\d+", parts)))


@EVERY
def test_the_parts_of_a_measured_difference_add_up_to_the_title(path: Path) -> None:
    report, screen, _ = replayed(path)
    of_speed = report.verdict.basis == "measured" and report.verdict.status not in GRAVE
    if not of_speed or not if_recorded(as_is_difference, report.facts):
        return
    (found,) = filter(None, map(MEASURED.match, screen.answer.why))
    fp8, bf16 = map(number, re.findall(r"[\d,]+\.\d", screen.answer.numbers)[:2])
    apart = round(fp8 - bf16, 1)
    assert (number(found[1]), found[2]) == (abs(apart), "longer" if apart > 0 else "less")
    assert total(found[3]) == pytest.approx(apart, abs=0.01)
    assert found[3].count("rest ") <= 1


@EVERY
def test_the_parts_of_an_estimate_give_the_ratio_of_the_title(path: Path) -> None:
    report, screen, _ = replayed(path)
    expects = estimate_told(report)
    if expects is None or expects.is_of_another_step or state_now(report) or report.verdict.status in GRAVE:
        return
    if ended_rank(report.facts):
        return
    found = ESTIMATED.match(screen.answer.why[0])
    assert found, screen.answer.why
    fp8, bf16 = number(found[1]), number(found[2])
    assert total(found[3]) == pytest.approx(fp8 - bf16, abs=0.011)
    if title := TITLE.search(screen.answer.what):
        faster = float(title[1]) if title[2] == "faster" else 1 / float(title[1])
        assert bf16 / fp8 == pytest.approx(faster, rel=0.02)


@EVERY
def test_what_bf16_would_gain_from_too_is_not_the_first_reason(path: Path) -> None:
    """It costs both alike, so it does not say why FP8 is faster or slower."""
    report, screen, _ = replayed(path)
    divided = [number for number, each in enumerate(screen.answer.why) if MEASURED.match(each)]
    for finding in report.findings:
        alike = finding.treatment and traits(finding.treatment.name).helps_bf16_too
        for behind in divided if alike else ():
            title = finding.title[:40].lower()
            assert not any(title in each.lower() for each in screen.answer.why[:behind])


@EVERY
def test_a_state_that_is_the_title_is_explained_before_any_other_finding(path: Path) -> None:
    report, screen, _ = replayed(path)
    state = state_now(report)
    if state and screen.answer.what == state.title:
        others = {each.title.rstrip(".").lower() for each in report.findings if each is not state}
        assert screen.answer.why[0].rstrip(".").lower() not in others


EXPLAINED = "not explained by the estimate"


@EVERY
def test_a_residual_is_named_once_and_is_no_other_work(path: Path) -> None:
    report, screen, _ = replayed(path)
    expects, told = estimate_told(report), " ".join(screen.answer.why)
    profiled = recorded(report.facts, "observed.breakdown")
    if expects and expects.ran_ms and expects.modelled_ms and not profiled:
        apart = expects.ran_ms - expects.modelled_ms
        named = re.search(rf"{EXPLAINED} ([−+][\d,]+\.\d+)", told)
        assert bool(named) == (abs(apart) >= 0.05)
        assert not named or number(named[1]) == pytest.approx(apart, abs=0.051)
    if expects and expects.ran_ms and not profiled:
        assert "No check knows why" not in told


@EVERY
def test_the_estimated_parts_of_a_measured_difference_add_up(path: Path) -> None:
    report, screen, _ = replayed(path)
    told = next((each for each in screen.answer.why if "was not profiled: " in each), "")
    if told and report.verdict.step_ms and report.verdict.bf16_step_ms:
        assert total(told) == pytest.approx(report.verdict.step_ms - report.verdict.bf16_step_ms, abs=0.11)


@EVERY
def test_a_fault_leaves_the_reason_of_the_slowness_in_the_box(path: Path) -> None:
    report, screen, _ = replayed(path)
    verdict, told = report.verdict, screen.answer.why
    apart = if_recorded(as_is_difference, report.facts)
    slow = apart and apart.difference_ms > EVEN * (verdict.bf16_step_ms or 0.0)
    if verdict.status == "layers_do_not_learn" and slow:
        assert any(map(MEASURED.match, told))
    expects = estimate_told(report)
    if ended_rank(report.facts) and expects and expects.as_is_loses:
        assert any(map(ESTIMATED.match, told))


@EVERY
def test_fp8_that_is_not_compiled_beside_compiled_bf16_is_called_so(path: Path) -> None:
    report, screen, view = replayed(path)
    in_parts = any(map(MEASURED.match, screen.answer.why)) and view.uses_fp8
    if not in_parts or view.bf16.name not in (ArmName.BF16_COMPILED, ArmName.BF16_AS_COMPILED):
        return
    blocks = report.facts.network.blocks
    if blocks and all(recorded(each, "compiled") and not each.compiled for each in blocks):
        assert "not compiled" in " ".join(screen.answer.why)


@EVERY
def test_an_estimate_of_another_step_says_what_has_to_change_first(path: Path) -> None:
    report, screen, _ = replayed(path)
    expects = estimate_told(report)
    if expects and expects.is_of_another_step:
        assert not any(each.startswith("FP8 would take") for each in screen.answer.why)


@EVERY
def test_slower_fp8_is_not_said_to_be_without_a_cause_if_its_parts_show_one(path: Path) -> None:
    report, screen, _ = replayed(path)
    expects = estimate_told(report)
    found = next(filter(None, map(ESTIMATED.match, screen.answer.why)), None)
    if expects and not expects.recipes and found and not state_now(report):
        saved, cast = (re.search(rf"{part} ([−+][\d,.]+\d)", found[3]) for part in ("matmuls", "casts"))
        if saved and cast and number(cast[1]) > abs(number(saved[1])) and (expects.as_is or 1.0) < 1 - EVEN:
            assert "No check found anything that slows FP8 down." not in screen.answer.why


@EVERY
def test_the_rest_has_one_value_on_a_screen(path: Path) -> None:
    _, screen, _ = replayed(path)
    found = re.search(r"\brest ([−+][\d,.]+\d)", " ".join(screen.answer.why))
    below = (
        [each.ms for each in screen.difference.changes if each.label == "rest"] if screen.difference else []
    )
    assert not found or not below or number(found[1]) == pytest.approx(below[0], abs=0.051)


@EVERY
def test_a_cause_that_bf16_has_too_says_so(path: Path) -> None:
    report, screen, _ = replayed(path)
    told = " ".join(screen.answer.why)
    fp8 = if_recorded(uses_fp8, report.facts)
    for finding in report.findings if fp8 and report.verdict.status not in GRAVE else ():
        fix = traits(finding.treatment.name) if finding.treatment else None
        alike = fix and fix.helps_bf16_too and finding.code != IDLE
        title = finding.title.rstrip(".")
        if alike and finding.severity == "warning" and title[1:] in told:
            behind = told[told.index(title[1:]) + len(title) - 1 :]
            assert "BF16" in behind.partition(". ")[0]


@EVERY
def test_what_checkpointing_costs_fp8_alone_is_a_reason(path: Path) -> None:
    report, screen, _ = replayed(path)
    found = next((each for each in report.findings if each.code == "CKP003"), None)
    if found and report.verdict.status == "fp8_slower":
        assert found.title.rstrip(".") in " ".join(screen.answer.why)
