"""A step whose loss or gradients are not finite leads the screen, and no plan ends in one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from fp8doctor.render.screen import first_screen
from fp8doctor.report import load_report
from tests.diagnosis.trials import Of, around
from tests.test_recorded import RECORDED

STATIC_SCALE = load_report(RECORDED / "h200-static_scale.json.gz").facts


def with_nan_in(facts: Facts, **found: tuple[str, ...]) -> Facts:
    """The trial with these findings about loss and gradients of its steps."""
    arms = (
        replace(each, non_finite=found.get(each.name, ())) if each.tried else each
        for each in facts.trial.arms
    )
    return replace(facts, trial=replace(facts.trial, arms=tuple(arms)))


def test_nan_in_fp8_leads_the_recorded_screen() -> None:
    report = diagnose(STATIC_SCALE)
    said = first_screen(report).answer
    assert (report.verdict.status, said.tone) == ("not_finite", "bad")
    assert said.why[1].startswith("FP8 takes "), "why it is slow, too"
    assert [step.code for step in report.prescription] == ["NUM001", "CMP001"]


def test_a_step_that_is_not_finite_has_no_speed_in_the_table() -> None:
    speeds = {each.label: each.speed for each in first_screen(diagnose(STATIC_SCALE)).variants}
    assert speeds["FP8 with fix 2"] == "1.14x"


@pytest.mark.parametrize("now", [(), ("loss", "gradients")], ids=["finite as it is", "NaN as it is"])
def test_no_plan_ends_in_a_step_that_is_not_finite(now: tuple[str, ...]) -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(120.0),
        "bf16_compiled": around(100.0),
        "prescribed": around(80.0),
    }
    facts = with_nan_in(Of(arms, bases={}).facts(), as_is=now, prescribed=("gradients",))
    end = trial_view(facts).end
    assert end is not None
    assert end.arm.name == "bf16_compiled"
    report = diagnose(facts)
    stays = next(each for each in report.prescription if each.treatment.name == STAY_IN_BF16)
    assert "80.0 ms" not in stays.treatment.summary
    assert "80.0 ms" not in first_screen(report).answer.then.sentence
    assert "80.0 ms" not in report.verdict.summary
    assert report.verdict.achievable_speedup in (None, 100.0 / 120.0)


def test_where_bf16_is_not_finite_either_the_fastest_step_counts() -> None:
    arms: dict[str, tuple[float, ...] | str] = {"as_is": around(80.0), "bf16_compiled": around(100.0)}
    facts = with_nan_in(Of(arms).facts(), as_is=("loss",), bf16_compiled=("loss",))
    report = diagnose(facts)
    assert report.verdict.status == "not_finite"
    assert first_screen(report).answer.what == "The loss is not finite, in BF16 too"
    end = trial_view(facts).end
    assert end is not None
    assert end.is_as_is


def test_nan_that_bf16_has_too_is_no_reason_to_leave_fp8_off() -> None:
    arms: dict[str, tuple[float, ...] | str] = {"as_is": around(120.0), "bf16_compiled": around(100.0)}
    finite, nan = (
        trial_reason(with_nan_in(Of(arms, bases={}).facts(), **dict.fromkeys(arms, found)))
        for found in ((), ("loss", "gradients"))
    )
    assert nan == finite


def trial_reason(facts: Facts) -> str:
    plan = diagnose(facts).prescription
    return next(each.treatment.summary for each in plan if each.treatment.name == STAY_IN_BF16)


def test_layers_that_overflow_alone_are_the_first_cause() -> None:
    """All steps were finite, so speed leads; the layer is named before what costs time."""
    facts = with_nan_in(STATIC_SCALE)
    report = diagnose(facts)
    assert report.verdict.status == "fp8_slower"
