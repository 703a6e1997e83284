"""The verdict that a trial allows, from arms written down by hand, and what goes before speed."""

import msgspec
import pytest

from fp8doctor.cli.gate import Gate
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, Observation, Trial, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.report import load_report
from tests.checks.arms import ran, timed
from tests.diagnosis.trials import SLOW, Of, around, without_fp8
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED


def test_the_founding_case() -> None:
    report = diagnose(Of(SLOW).facts())
    verdict = report.verdict
    assert (verdict.status, verdict.basis) == ("fp8_slower", "measured")
    assert (verdict.speedup, verdict.achievable_speedup) == pytest.approx((0.253, 1.05), abs=0.001)
    assert verdict.tokens_per_s == pytest.approx(16384 / 0.3661, rel=1e-6)
    assert report.reaches("error")


@pytest.mark.parametrize(
    ("as_is", "status"),
    [
        (around(92.7), "fp8_even"),
        (around(93.0, spread=2.0), "fp8_even"),
        (around(92.7, spread=20.0), "open"),
        (around(85.0), "fp8_faster"),
        (around(99.0), "fp8_slower"),
    ],
)
def test_the_status(as_is: tuple[float, ...], status: str) -> None:
    assert diagnose(Of({**SLOW, "as_is": as_is}).facts()).verdict.status == status


def test_a_timing_too_noisy_to_tell_gives_no_ratio() -> None:
    report = diagnose(Of({**SLOW, "as_is": around(80.0, spread=20.0), "prescribed": "not asked"}).facts())
    verdict = report.verdict
    assert (verdict.status, verdict.speedup, verdict.achievable_speedup) == ("open", None, None)
    assert (verdict.speedup_low, verdict.speedup_high) == pytest.approx((92.5 / 100, 92.5 / 60), rel=0.01)
    for gate, missed in ((Gate(strict=True), 1), (Gate(min_speedup=1.1), 1), (Gate(), 0)):
        assert len([*gate.missed(report)]) == missed
    assert verdict.open


@pytest.mark.parametrize(
    ("alike", "as_is", "status"),
    [
        (0.955, 97.0, "open"),
        (1.05, 97.0, "open"),
        (0.985, 97.0, "fp8_slower"),
        (0.955, 105.0, "fp8_slower"),
        (1.05, 80.0, "fp8_faster"),
    ],
)
def test_an_effect_no_larger_than_what_parts_a_step_from_its_copy_is_noise(
    alike: float, as_is: float, status: str
) -> None:
    facts = Of({**SLOW, "as_is": around(as_is), "prescribed": "not asked"}).facts()
    trial = msgspec.structs.replace(facts.trial, self_check_ratio=alike)
    verdict = diagnose(msgspec.structs.replace(facts, trial=trial)).verdict
    assert verdict.status == status
    assert (verdict.speedup is None) == (status == "open")


@pytest.mark.slow
def test_what_helps_bf16_too_is_not_counted_for_fp8() -> None:
    arms = {
        "as_is": around(107.8),
        "bf16": around(131.0),
        "bf16_compiled": around(119.6),
        "prescribed": around(93.2),
    }
    without = {**arms, "bf16_without_checkpointing": around(98.1)}
    verdict = diagnose(Of(without, treatments=("checkpointing-off",), bases={}).facts()).verdict
    assert verdict.achievable_speedup == pytest.approx(1.053, abs=0.002)
    too_large = {**arms, "bf16_without_checkpointing": Reason.DOES_NOT_FIT}
    verdict = diagnose(Of(too_large, treatments=("checkpointing-off",), bases={}).facts()).verdict
    assert verdict.achievable_speedup == pytest.approx(119.6 / 93.2, abs=0.002)
    unknown = diagnose(Of(arms, treatments=("adapters-to-bf16", "compile-blocks"), bases={}).facts()).verdict
    assert unknown.achievable_speedup is None


def test_fp8_that_was_asked_for_and_is_not_there_stays_so_when_the_model_was_timed() -> None:
    asked = msgspec.structs.replace(DECODER_468M.environment, variables={"ACCELERATE_MIXED_PRECISION": "fp8"})
    seen = msgspec.structs.replace(DECODER_468M.training, gradients_seen=True)
    base = msgspec.structs.replace(without_fp8(), environment=asked, training=seen)
    verdict = diagnose(Of({"as_is": around(103.6), "bf16_compiled": around(92.7)}).facts(base)).verdict
    assert verdict.status == "fp8_not_engaged"
    assert verdict.step_ms == 103.6


def facts_of(name: str) -> Facts:
    return load_report(RECORDED / f"h200-{name}.json.gz").facts


def test_a_step_that_raises_is_graver_than_layers_that_do_not_learn() -> None:
    facts = facts_of("unaligned")
    learns_not = msgspec.structs.replace(
        facts.training, parameters_outside_optimizer=2, optimizer="torch.optim.AdamW"
    )
    report = diagnose(msgspec.structs.replace(facts, training=learns_not))
    assert "layers_do_not_learn" in {each.breaks for each in report.findings if recorded(each, "breaks")}
    assert report.verdict.status == "step_raises"


def test_a_step_that_ran_on_a_gpu_does_not_raise() -> None:
    arms = (ran("as_is", 90.0), ran("bf16", 100.0))
    report = diagnose(timed(facts_of("unaligned"), *arms))
    assert "SHP001" in {each.code for each in report.findings}
    assert report.verdict.status == "fp8_faster"


def test_a_step_that_did_raise_is_told_before_all_else() -> None:
    raised = Trial(device="cuda", arms=(), why=Reason.STEP_RAISES, reason="the step raises ValueError: no")
    report = diagnose(msgspec.structs.replace(facts_of("converted_by_hand"), trial=raised))
    assert (report.verdict.status, report.verdict.basis) == ("step_raises", "measured")
    assert report.worst() == "error"
    seen = Observation(steps_ms=(50.0,) * 10, clock="cuda")
    watched = msgspec.structs.replace(facts_of("multi_query"), trial=raised, observed=seen)
    assert diagnose(watched).verdict.status == "open", "a copy raised: the job's own steps ran"
