"""On every recorded screen savings add up, times are of rows, and the largest cost is the first reason."""

from __future__ import annotations

import itertools
import re

import pytest

from fp8doctor.analysis.rank_comparison import exposed_of_ranks, step_ms, timed_ranks
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, traits
from fp8doctor.facts import Facts, Observation, recorded
from fp8doctor.render.box import answer
from fp8doctor.render.causes import NON_FINITE
from fp8doctor.render.details import gained_alone
from fp8doctor.render.planned_fixes import saves
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.timing import as_is_difference
from tests.diagnosis.test_plan_end import TRIALS

MS = re.compile(r"(?<!± )(?<![\d.,])(\d[\d,]*\.\d)(?= ms|/step)")


def shown(ms: float | None) -> float:
    return round(ms or 0.0, 1)


@pytest.mark.parametrize("name", TRIALS)
def test_the_savings_of_a_plan_add_up_to_what_it_saves(name: str) -> None:
    report, view = TRIALS[name]
    assert view.end is not None
    assert view.as_is is not None
    saved = [each.saving_ms for each in report.prescription if each.saving_ms]
    measured = [each for each in saved if each.basis == "measured"]
    whole = shown(view.as_is.step_ms) - shown(view.end.arm.step_ms)
    assert sum(each.middle for each in measured) == pytest.approx(whole, abs=0.01)
    screen = first_screen(report)
    plan = "\n".join((*(fix.aside for fix in screen.fixes), screen.folded))
    for each in measured:
        assert any(saves(each, after) in plan for after in ("", *(f"with fix {n} " for n in range(1, 9))))
        assert {f"{each.from_ms:,.1f}", f"{each.to_ms:,.1f}"} <= {row.step for row in screen.variants}


def times(screen: Screen, facts: Facts) -> set[float]:
    """The times of the table, their differences, a difference's bars, a row's kernels, and the ranks' own."""
    rows = {shown(row.ms) for row in screen.variants}
    between = {round(abs(a - b), 1) for a, b in itertools.combinations(rows, 2)}
    bars = {shown(abs(change.ms)) for change in (screen.difference.changes if screen.difference else ())}
    profiled = [found for each in facts.arms() if each.tried and (found := each.get("breakdown"))]
    ranks = {shown(ms) for ms in (*exposed_of_ranks(facts), *map(step_ms, watched(facts))) if ms}
    families = {shown(ms) for found in profiled for ms in found.families_ms.values()}
    return rows | between | bars | ranks | families


def watched(facts: Facts) -> list[Observation]:
    """The steps of each rank, which its line tells."""
    return [each.observed for each in timed_ranks(facts)] if recorded(facts, "ranks") else []


@pytest.mark.parametrize("name", TRIALS)
def test_every_time_of_an_answer_is_in_the_table(name: str) -> None:
    report, _ = TRIALS[name]
    screen = first_screen(report)
    said = screen.answer
    told = (*said.why, *said.fix, said.then.sentence, said.numbers, screen.compared)
    asides = (f"{fix.summary} {fix.aside}" for fix in screen.fixes)
    for sentence in (*told, *asides, *(notice.text for notice in screen.notices)):
        if "estimated" not in sentence:
            unknown = {float(ms.replace(",", "")) for ms in MS.findall(sentence)} - times(
                screen, report.facts
            )
            assert not unknown, sentence


SLOWER = [name for name, (report, _) in TRIALS.items() if report.verdict.status == "fp8_slower"]


@pytest.mark.parametrize("name", SLOWER)
def test_the_first_reason_has_the_largest_measured_cost(name: str) -> None:
    report, _ = TRIALS[name]
    costs = [
        each.saving_ms.middle
        for each in report.findings
        if each.severity != "info" and gained_alone(each) and each.saving_ms and each.treatment
        if each.treatment.name != STAY_IN_BF16 and not traits(each.treatment.name).helps_bf16_too
    ]
    found = as_is_difference(report.facts)
    if found:
        rest = (ms for part, ms in found.parts_ms.items() if part not in ("GEMMs", "casts"))
        costs += [found.casts_unpaid_ms, *rest]
    if not any(step.treatment.name == STAY_IN_BF16 for step in report.prescription):
        fp8_alone = [s for s in report.prescription if not traits(s.treatment.name).helps_bf16_too]
        costs += [step.saving_ms.middle for step in fp8_alone if step.saving_ms and step.code]
    if costs:
        nan = next((each.title for each in report.findings if each.code == NON_FINITE), None)
        first, most = next(each for each in answer(report).why if not nan or nan not in each), max(costs)
        casts = f"{found.parts_ms['casts']:,.1f}" if found and most == found.casts_unpaid_ms else ""
        assert f"{most:,.1f}" in first or (casts and casts in first)


@pytest.mark.parametrize("name", TRIALS)
def test_a_share_of_a_step_is_of_the_step_of_the_title(name: str) -> None:
    """What was timed on another variant names that variant."""
    report, _ = TRIALS[name]
    said = answer(report)
    for whole in re.findall(r"[\d,.]+ of ([\d,.]+) ms/step(?! in )", " ".join(said.why)):
        assert whole == f"{report.verdict.step_ms:,.1f}"


@pytest.mark.parametrize("name", TRIALS)
def test_a_ratio_and_a_saving_are_of_the_same_two_steps(name: str) -> None:
    report, _ = TRIALS[name]
    screen = first_screen(report)
    told = (*screen.answer.why, *(each.text for each in screen.notices))
    for sentence in told:
        ratios = re.findall(r"([\d.]+)x (?:slower|faster|as fast)", sentence)
        of = re.search(r"([\d,.]+) of ([\d,.]+) ms/step", sentence)
        if ratios and of:
            saved, whole = (float(ms.replace(",", "").rstrip(".")) for ms in of.groups())
            assert float(ratios[0]) == pytest.approx(whole / (whole - saved), abs=0.011), sentence


@pytest.mark.parametrize("name", TRIALS)
def test_a_cause_costs_what_its_fix_saves(name: str) -> None:
    report, _ = TRIALS[name]
    why = answer(report).why
    for step in report.prescription:
        saved = step.saving_ms
        told = next((each for each in why if step.title[:40].lower() in each.lower()), "")
        if saved and saved.from_ms and saved.low > 0 and " ms/step" in told and not step.together:
            assert f"{saved.middle:,.1f}" in told


@pytest.mark.parametrize("name", SLOWER)
def test_the_parts_behind_a_measured_cause_divide_the_whole_gap(name: str) -> None:
    """They are no further cost beside it."""
    report, _ = TRIALS[name]
    why = answer(report).why
    if any(re.search(r"[\d,.]+ of [\d,.]+ ms/step", each) for each in why):
        assert not re.search(r"casts? cost|idle GPU time costs", " ".join(why))
