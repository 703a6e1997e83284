"""What goes before an answer about speed: a step that raises, layers that do not learn."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, Trial, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.report import load_report
from tests.checks.arms import ran, timed
from tests.test_recorded import RECORDED

RECORDED_ANSWERS = {
    "unaligned": ("step_raises", "SHP001"),
    "mxfp8_on_hopper": ("step_raises", "GPU002"),
    "converted_by_hand": ("layers_do_not_learn", "MOD007"),
    "fp8_storage": ("layers_do_not_learn", "MOD003"),
}


def facts_of(name: str) -> Facts:
    return load_report(RECORDED / f"h200-{name}.json.gz").facts


@pytest.mark.parametrize("name", RECORDED_ANSWERS)
def test_what_breaks_the_job_decides_the_verdict_the_plan_and_the_exit_code(name: str) -> None:
    status, code = RECORDED_ANSWERS[name]
    report = diagnose(facts_of(name))
    found = next(each for each in report.findings if each.code == code)
    assert (report.verdict.status, found.breaks) == (status, status)
    assert found.title == report.answer.fault.reason
    assert report.prescription[0].code == code
    assert report.worst() == "error"


def test_a_step_that_raises_is_graver_than_layers_that_do_not_learn() -> None:
    facts = facts_of("unaligned")
    learns_not = replace(facts.training, parameters_outside_optimizer=2, optimizer="torch.optim.AdamW")
    report = diagnose(replace(facts, training=learns_not))
    assert {each.breaks for each in report.findings if recorded(each, "breaks")} == {
        "step_raises",
        "layers_do_not_learn",
    }
    assert report.verdict.status == "step_raises"


def test_a_step_that_ran_on_a_gpu_does_not_raise() -> None:
    arms = (ran("as_is", 90.0), ran("bf16", 100.0))
    report = diagnose(timed(facts_of("unaligned"), *arms))
    assert "SHP001" in {each.code for each in report.findings}
    assert report.verdict.status == "fp8_faster"


def test_a_step_that_did_raise_is_told_before_all_else() -> None:
    raised = Trial(device="cuda", arms=(), why=Reason.STEP_RAISES, reason="the step raises ValueError: no")
    report = diagnose(replace(facts_of("converted_by_hand"), trial=raised))
    assert (report.verdict.status, report.verdict.basis) == ("step_raises", "measured")
    assert report.worst() == "error"
