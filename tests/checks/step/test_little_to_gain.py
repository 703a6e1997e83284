"""STP003: a real FP8 step beside BF16 steps that were put together."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.checks.step.little_to_gain import little_to_gain
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, Workload
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import timed
from tests.checks.step.conftest import beside, families_of, with_arms
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, profiled, unprofiled
from tests.facts_of import DECODER_468M

pytestmark = pytest.mark.slow

MOSTLY_ATTENTION = profiled(
    "bf16_compiled", 92.7, gemm_16bit=12.0, attention=62.0, optimizer=5.0, pointwise=12.0
)
IN_FP8 = profiled(
    "prescribed",
    95.0,
    arm={"treatments": ("compile-blocks",), "base": "as_is"},
    gemm_fp8=7.0,
    cast=9.0,
    attention=62.0,
    pointwise=12.0,
)


def gemms_of(facts: Facts) -> float:
    return sum(ms for family, ms in families_of(facts).items() if family.startswith("gemm_"))


def test_a_real_step_whose_gemms_are_few(sick: Facts) -> None:
    gemms, step = gemms_of(sick), 40 * gemms_of(sick)
    sick = with_arms(sick, msgspec.structs.replace(sick.trial.arms[0], step_ms=step, rounds_ms=(step,) * 6))
    finding = little_to_gain(beside(sick, {"gemm_16bit": 2 * gemms, "attention": 30 * gemms}))
    assert isinstance(finding, Finding)
    assert finding.evidence["fp8_gemms_ms"] == pytest.approx(gemms)
    assert finding.evidence["gemms_pct"] == pytest.approx(100 * 2 / 32)
    assert finding.evidence["ceiling"] == pytest.approx(32 / 31)
    assert (finding.evidence["basis"], finding.evidence["largest_other"]) == ("measured", "attention")
    assert little_to_gain(beside(sick, {"gemm_16bit": 2 * gemms, "attention": gemms})) is None


def test_it_names_what_dominates() -> None:
    finding = little_to_gain(timed(DECODER_468M, FP8_EAGER, MOSTLY_ATTENTION, IN_FP8))
    assert isinstance(finding, Finding)
    assert finding.title == "FP8 cannot give more than about 1.06x here: matmuls are only 13% of the step"
    assert finding.explanation.endswith("The largest part that FP8 does not change: attention, 62.0 ms.")


def test_staying_in_bf16_is_a_prescription_where_fp8_stays_slower() -> None:
    report = diagnose(timed(DECODER_468M, FP8_EAGER, MOSTLY_ATTENTION, IN_FP8))
    finding = next(each for each in report.findings if each.code == "STP003")
    assert finding.severity == "info"
    assert finding.treatment is not None
    assert report.prescription[-1].treatment.name == finding.treatment.name == "stay-in-bf16"
    faster = msgspec.structs.replace(IN_FP8, step_ms=90.0, rounds_ms=(90.0,) * 6)
    finding = next(
        each
        for each in diagnose(timed(DECODER_468M, FP8_EAGER, MOSTLY_ATTENTION, faster)).findings
        if each.code == "STP003"
    )
    assert finding.treatment is None


def test_enough_to_gain() -> None:
    assert little_to_gain(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED)) is None


def test_there_is_no_answer() -> None:
    assert isinstance(
        little_to_gain(timed(DECODER_468M, FP8_EAGER, unprofiled("bf16_compiled", 92.7))), NotApplicable
    )
    assert isinstance(little_to_gain(timed(DECODER_468M, FP8_EAGER)), NotApplicable)
    assert isinstance(little_to_gain(timed(DECODER_468M, FP8_EAGER, BF16, device="cpu")), NotApplicable)
    nothing_known = msgspec.structs.replace(DECODER_468M, workload=Workload(tokens=None))
    assert isinstance(
        little_to_gain(timed(nothing_known, unprofiled("as_is", 366.1), MOSTLY_ATTENTION)), NotApplicable
    )
