"""Why on a recorded screen gives the reason of the headline, in parts that add up; a fault stands behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.analysis.treatment_table import traits
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.facts import if_recorded
from fp8doctor.render.causes import estimate_told, state_now
from fp8doctor.render.ended_ranks import ended_rank
from fp8doctor.render.timing import as_is_difference
from tests.diagnosis.test_plan_agrees import EVERY, replayed

MEASURED = re.compile(r"FP8 (?:takes|would take) ([\d,.]+) ms/step (longer|less)(?:, [\w ]+)?: (.+)\.$")
ESTIMATED = re.compile(
    r"FP8 (?:takes|would take) (?:about )?([\d,.]+) ms/step, BF16 (?:would take about )?([\d,.]+) "
    r"\(estimated\): (.+?\d)\.(?= |$)"
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
