"""What a treatment saves, as a trial proves it."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.measured_savings import with_measured_savings
from fp8doctor.finding import Finding, Saving, Treatment
from tests.diagnosis.trials import LOSING, SLOW, Of, around, explored, without_fp8


def test_a_treatment_that_was_timed_alone_has_a_measured_saving() -> None:
    step = diagnose(Of(SLOW).facts()).prescription[0]
    assert step.code == "CMP001"
    assert step.saving_ms is not None
    assert (step.saving_ms.basis, step.saving_ms.gpu) == ("measured", "NVIDIA H200")
    assert step.saving_ms.low <= 277.8 <= step.saving_ms.high


def test_a_treatment_that_saves_nothing_is_refuted_and_keeps_its_cost() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(400.0)}).facts())
    outcome = next(each for each in report.outcomes if each.code == "CMP001")
    finding = next(each for each in report.findings if each.code == "CMP001")
    assert (outcome.outcome, outcome.reason) == (
        "refuted",
        "measured: compile-blocks costs 33.9 ms/step instead of saving",
    )
    assert finding.saving_ms is not None
    assert finding.saving_ms.high < 0
    assert finding.severity == "info"
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]


@pytest.mark.parametrize("prescribed", [94.0, 400.0])
def test_a_cpu_neither_refutes_a_treatment_nor_says_what_it_saves(prescribed: float) -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(prescribed)}, device="cpu").facts())
    (step,) = report.prescription
    assert (step.code, step.saving_ms and step.saving_ms.basis) == ("CMP001", "modelled")


def test_several_treatments_together_prove_none_of_them_alone() -> None:
    step = diagnose(Of(SLOW, treatments=("stop-checkpointing", "compile-blocks")).facts()).prescription[0]
    assert step.saving_ms is not None
    assert step.saving_ms.basis == "modelled"


def test_a_treatment_is_weighed_on_top_of_its_base() -> None:
    findings = (
        Finding(
            title="t",
            explanation="e",
            code="SHP005",
            treatment=Treatment(name="recipe-rowwise", summary="s", code="c"),
        ),
    )
    ((weighed,), _) = with_measured_savings(trial_view(explored()), findings, ())
    assert weighed.saving_ms is not None
    assert round(weighed.saving_ms.middle, 1) == 8.3
    own = msgspec.structs.replace(findings[0], saving_ms=Saving(low=1.0, high=2.0, basis="measured"))
    assert with_measured_savings(trial_view(explored()), (own,), ())[0] == (own,)


@pytest.mark.parametrize(("prescribed", "saved"), [(100.0, 7.3), (88.3, -4.4)])
def test_staying_in_bf16_is_weighed_by_the_best_of_both(prescribed: float, saved: float) -> None:
    saving = with_measured_savings(
        trial_view(Of({**SLOW, "prescribed": around(prescribed)}).facts()), (LOSING,), ()
    )[0][0].saving_ms
    assert saving is not None
    assert round(saving.middle, 1) == saved


def test_staying_in_bf16_saves_nothing_of_a_model_without_fp8() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(99.0),
    }
    assert with_measured_savings(trial_view(Of(arms).facts(without_fp8())), (LOSING,), ())[0] == (LOSING,)
