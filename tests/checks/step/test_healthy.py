"""STP005 on arms that were timed: where FP8 gains, and what that takes, comes from recordings of a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fp8doctor import load_report
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Outcome
from fp8doctor.render.text import render
from fp8doctor.report import Report
from fp8doctor.wording import times
from tests.checks.arms import timed
from tests.checks.step.profiled import BF16, FP8_COMPILED
from tests.facts_of import DECODER_468M

RECORDED = Path(__file__).parents[2] / "patients" / "recorded"


def outcome_of(report: Report) -> Outcome:
    return next(each for each in report.outcomes if each.code == "STP005")


def test_compiled_fp8_on_an_h200_pays() -> None:
    report = load_report(RECORDED / "h200-decoder_468m_compiled.json.gz")
    finding = next(each for each in report.findings if each.code == "STP005")
    assert finding.evidence["speedup"] == report.verdict.speedup
    assert report.verdict.status == "fp8_faster"
    ratio = times(report.verdict.bf16_step_ms, report.verdict.step_ms)
    assert finding.title == f"FP8 pays off: {ratio} of the best BF16"


@pytest.mark.parametrize("recording", ["decoder_468m", "te_without_autocast"])
def test_a_recorded_slowdown_is_not_called_healthy(recording: str) -> None:
    report = load_report(RECORDED / f"h200-{recording}.json.gz")
    assert (outcome_of(report).outcome, outcome_of(report).reason) == (
        "not_applicable",
        "FP8 is not faster than BF16 here",
    )
    assert "[✓] step" not in render(report)


def test_what_could_not_be_timed_is_not_called_healthy() -> None:
    failed = msgspec.structs.replace(
        BF16,
        name="as_is",
        tried=False,
        reason="the GPU's memory is too small for it",
        step_ms=None,
        rounds_ms=(),
    )
    outcome = outcome_of(diagnose(timed(DECODER_468M, failed, BF16)))
    assert (outcome.outcome, outcome.reason) == (
        "not_applicable",
        "the trial did not time both your step and the best BF16",
    )


def test_a_gain_on_a_cpu_is_none_on_a_gpu() -> None:
    arms = msgspec.structs.replace(FP8_COMPILED, name="as_is"), BF16
    report = diagnose(timed(DECODER_468M, *arms, device="cpu"))
    assert "STP005" not in {each.code for each in report.findings}


def test_what_is_left_against_the_ceiling() -> None:
    report = diagnose(timed(DECODER_468M, msgspec.structs.replace(FP8_COMPILED, name="as_is"), BF16))
    finding = next(each for each in report.findings if each.code == "STP005")
    assert finding.evidence["ceiling"] == pytest.approx(92.7 / 66.6)
    assert finding.evidence["left_ms"] == pytest.approx(88.3 - 66.6)
    assert finding.explanation.endswith(
        "Upper bound: about 1.39x, if FP8 changed only the matmuls (measured); 21.7 ms are left to gain."
    )


def test_without_a_breakdown_nothing_is_said_of_a_ceiling() -> None:
    facts = load_report(RECORDED / "h200-decoder_468m_compiled.json.gz").facts
    arms = tuple(msgspec.structs.replace(each, breakdown=NOT_RECORDED) for each in facts.trial.arms)
    before = msgspec.structs.replace(facts.trial, arms=arms, shapes=NOT_RECORDED)
    finding = next(
        each
        for each in diagnose(msgspec.structs.replace(facts, trial=before)).findings
        if each.code == "STP005"
    )
    assert finding.evidence["ceiling"] is None
    assert finding.explanation.endswith("timed in turn in one process.")
