"""The verdict and the savings that a trial proves, from arms written down by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor import load_report, registry
from fp8doctor.analysis.arms import best_bf16, ratio
from fp8doctor.analysis.median_interval import Interval
from fp8doctor.analysis.outcome import is_decided, is_noise, stays_in_bf16, swallows_effect
from fp8doctor.cli.gate import Gate
from fp8doctor.diagnosis.diagnose import diagnose, hypotheses
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.measured_savings import with_measured_savings
from fp8doctor.diagnosis.prescription import as_timed, prescribe
from fp8doctor.facts import Arm, ArmCut, Facts, Gpu, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, Saving, Treatment
from fp8doctor.render import text
from tests.checks.arms import timed
from tests.checks.step.profiled import profiled
from tests.facts_of import DECODER_468M

RECORDED = Path(__file__).parents[1] / "patients" / "recorded"

GPU = Gpu(name="NVIDIA H200", vendor="nvidia", compute_capability="9.0", architecture=None, visible=True)


@dataclass
class Of:
    """Arms as (name, ms per round, treatments)."""

    arms: dict[str, tuple[float, ...] | str]
    device: str = "cuda"
    treatments: tuple[str, ...] = ("compile-blocks",)
    reliable: bool = True

    def facts(self, base: Facts = DECODER_468M) -> Facts:
        trial = Trial(
            device=self.device,
            gpu="NVIDIA H200" if self.device == "cuda" else None,
            blocks={},
            arms=tuple(self._arm(name, rounds) for name, rounds in self.arms.items()),
            self_check_ratio=1.0,
            reliable=self.reliable,
            reason=None
            if self.reliable
            else "the step timed against its own copy gives 1.100 instead of 1.00",
            budget_s=60.0,
            elapsed_s=31.0,
        )
        return msgspec.structs.replace(base, trial=trial)

    bases: dict[str, str] | None = None
    """Name of an arm that carries out the treatment of its name -> its base; None writes no bases, as older
    trials did."""

    def _arm(self, name: str, rounds: tuple[float, ...] | str) -> Arm:
        treatments = (
            self.treatments if name == "prescribed" else (name,) if name in (self.bases or {}) else ()
        )
        if isinstance(rounds, str):
            why = rounds if isinstance(rounds, Reason) else None
            return Arm(name=name, treatments=treatments, tried=False, why=why, reason=str(rounds))
        middle = sorted(rounds)[len(rounds) // 2]
        cut = ArmCut(blocks={}, step_ms=middle, peak_gib=20.0)
        return Arm(
            name=name,
            treatments=treatments,
            tried=True,
            reason=None,
            step_ms=middle,
            low_ms=min(rounds),
            high_ms=max(rounds),
            rounds_ms=rounds,
            peak_gib=20.0,
            cuts=(cut,),
            fp8_gemms=504,
            graphs_run=0,
            **(
                {"base": self.bases.get(name, "as_is" if name == "prescribed" else None)}
                if self.bases is not None
                else {}
            ),
        )


def render(report: Document) -> str:
    """The report with all that is known."""
    return text.render(report, verbose=True)


def around(ms: float, spread: float = 0.2) -> tuple[float, ...]:
    return tuple(ms + spread * offset for offset in (-1, -0.5, 0, 0, 0.5, 1))


SLOW = {
    "as_is": around(366.1),
    "bf16": around(103.6),
    "bf16_compiled": around(92.7),
    "prescribed": around(88.3),
}


def test_the_founding_case() -> None:
    report = diagnose(Of(SLOW).facts())
    verdict = report.verdict
    assert (verdict.status, verdict.basis) == ("fp8_slower", "measured")
    assert verdict.speedup == pytest.approx(0.253, abs=0.001)
    assert verdict.speedup_low is not None
    assert verdict.speedup_high is not None
    assert verdict.speedup_low < verdict.speedup < verdict.speedup_high  # type: ignore[operator]
    assert verdict.achievable_speedup == pytest.approx(1.05, abs=0.001)
    assert verdict.tokens_per_s == pytest.approx(16384 / 0.3661, rel=1e-6)
    assert verdict.summary == (
        "FP8 runs at 0.25x of BF16: 366.1 ms a step (44,753 tokens/s), best BF16 92.7 ms. With "
        "compile-blocks: 88.3 ms, 1.05x of BF16."
    )
    assert report.reaches("error")


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
        "measured: compile-blocks costs 33.9 ms a step instead of saving",
    )
    assert finding.saving_ms is not None
    assert finding.saving_ms.high < 0
    assert finding.severity == "info"
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]


def test_several_treatments_together_prove_none_of_them_alone() -> None:
    step = diagnose(Of(SLOW, treatments=("stop-checkpointing", "compile-blocks")).facts()).prescription[0]
    assert step.saving_ms is not None
    assert step.saving_ms.basis == "modelled"


@pytest.mark.parametrize(
    ("as_is", "status"),
    [
        (around(92.7), "fp8_even"),
        (around(90.5), "fp8_even"),
        (around(93.0, spread=2.0), "fp8_even"),
        (around(80.0, spread=20.0), "too_noisy"),
        (around(92.7, spread=20.0), "too_noisy"),
        (around(85.0), "fp8_faster"),
        (around(99.0), "fp8_slower"),
    ],
    ids=[
        "equal",
        "within 3 %",
        "interval holds 1",
        "effect swallowed",
        "open to both sides",
        "faster",
        "slower",
    ],
)
def test_the_status(as_is: tuple[float, ...], status: str) -> None:
    assert diagnose(Of({**SLOW, "as_is": as_is}).facts()).verdict.status == status


def test_a_timing_too_noisy_to_tell_gives_no_ratio() -> None:
    report = diagnose(Of({**SLOW, "as_is": around(80.0, spread=20.0), "prescribed": "not asked"}).facts())
    verdict = report.verdict
    assert (verdict.status, verdict.speedup, verdict.achievable_speedup) == ("too_noisy", None, None)
    assert (verdict.speedup_low, verdict.speedup_high) == pytest.approx((92.5 / 100, 92.5 / 60), rel=0.01)
    assert verdict.summary == (
        "The timing is too noisy to tell whether FP8 is faster than BF16: BF16's time divided by FP8's lies "
        "between 0.93 and 1.54 over 6 rounds. FP8 takes about 80.0 ms a step (204,800 tokens/s), the best "
        "BF16 92.7 ms."
    )
    assert not re.search(r"\dx", verdict.summary)
    assert Gate(strict=True).missed(report) == ("the timing is too noisy to tell (--strict)",)
    assert Gate(min_speedup=1.1).missed(report) == ("the timing is too noisy to tell (--min-speedup 1.1)",)
    assert Gate().missed(report) == ()
    healthy = next(each for each in report.outcomes if each.code == "STP005")
    assert healthy.reason == "the timing is too noisy to tell whether FP8 is faster than BF16"


@pytest.mark.parametrize(
    ("alike", "as_is", "status"),
    [
        (0.955, 97.0, "too_noisy"),
        (0.955, 93.0, "too_noisy"),
        (1.05, 97.0, "too_noisy"),
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
    assert ("no further apart than a step and its own copy" in verdict.summary) == (status == "too_noisy")
    assert (verdict.speedup is None) == (status == "too_noisy")


def test_what_fp8_would_give_is_not_told_from_noise() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(88.3, spread=20.0),
    }
    verdict = diagnose(Of(arms).facts(without_fp8())).verdict
    assert (verdict.status, verdict.achievable_speedup) == ("no_fp8", None)
    assert "too noisy to tell whether FP8 (tensorwise, compiled) would be faster" in verdict.summary


@given(
    st.floats(0.5, 2.0), st.floats(0.0, 0.4), st.floats(0.0, 0.4), st.one_of(st.none(), st.floats(0.8, 1.25))
)
def test_what_is_told_is_told_by_the_interval(
    middle: float, below: float, above: float, alike: float | None
) -> None:
    speedup = Interval(middle, middle - below, middle + above)
    trial = Trial(self_check_ratio=alike)
    if is_noise(speedup, trial) and alike in (None, 1.0):
        assert speedup.low <= 1 <= speedup.high
        assert not is_decided(speedup)
    if swallows_effect(speedup):
        assert is_noise(speedup, trial)


def test_fp8_that_never_ran_is_an_error() -> None:
    report = diagnose(Of({**SLOW, "as_is": Reason.NO_FP8_GEMM}).facts())
    assert report.verdict.status == "fp8_not_engaged"
    assert report.reaches("error")


@pytest.mark.parametrize(
    ("arms", "sentence"),
    [
        (
            {"as_is": "the GPU's memory is too small for it"},
            "The step could not be timed: the GPU's memory is too small for it.",
        ),
        ({"as_is": around(90.0)}, "No BF16 baseline could be timed: it was not tried."),
    ],
)
def test_what_could_not_be_timed_is_not_measured(
    arms: dict[str, tuple[float, ...] | str], sentence: str
) -> None:
    verdict = diagnose(Of(arms, device="cpu").facts()).verdict
    assert verdict.status == "not_measured"
    assert sentence in verdict.summary


def alone(name: str) -> tuple[Facts, Facts]:
    """A recorded job, and the same with the times of its BF16 lost."""
    facts = load_report(RECORDED / f"h200-{name}.json").facts
    arms = tuple(
        each if each.name == "as_is" else Of({})._arm(each.name, Reason.NO_TIME_LEFT)
        for each in facts.trial.arms
        if each.name in ("as_is", "bf16", "bf16_compiled")
    )
    return facts, msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))


@pytest.mark.parametrize(
    ("name", "status"), [("decoder_468m", "fp8_slower"), ("decoder_468m_compiled", "fp8_even")]
)
def test_a_bf16_that_was_not_timed_is_modelled_beside_the_step_that_was(name: str, status: str) -> None:
    """A modelled speedup near 1 is even: the model is not good enough to tell its sign."""
    known, lost = (diagnose(facts).verdict for facts in alone(name))
    assert (lost.status, lost.basis, lost.step_ms) == (status, "modelled", known.step_ms)
    assert lost.bf16_step_ms == pytest.approx(known.bf16_step_ms, rel=0.15)
    assert lost.summary.startswith(
        f"FP8 takes {known.step_ms:.1f} ms a step. No BF16 baseline could be timed: no_time_left. The best "
        f"BF16 would take about {lost.bf16_step_ms:.1f} ms, so that FP8 runs at about {lost.speedup:.2f}x of "
        "it (modelled on H200)."
    )


@pytest.mark.parametrize(
    ("name", "basis"), [("decoder_468m_compiled", "modelled"), ("decoder_468m", "measured")]
)
def test_fp8_is_not_called_faster_than_a_bf16_that_a_compiled_one_may_beat(name: str, basis: str) -> None:
    """Seen on an H200: a GPT compiled whole, 1.00x of eager BF16, and 0.91x of BF16 compiled like it. FP8
    that eager BF16 beats already is slower, whatever was left out."""
    facts = load_report(RECORDED / f"h200-{name}.json").facts
    arms = tuple(
        Of({})._arm(each.name, Reason.NO_TIME_LEFT) if each.name == "bf16_compiled" else each
        for each in facts.trial.arms
        if each.name in ("as_is", "bf16", "bf16_compiled")
    )
    lost = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))
    eager = next(each.step_ms for each in arms if each.name == "bf16")
    verdict = diagnose(lost).verdict
    assert verdict.basis == basis
    if basis == "modelled":
        assert verdict.bf16_step_ms is not None
        assert verdict.bf16_step_ms <= eager
        assert f"and BF16 {eager:.1f} ms, which may be faster compiled" in verdict.summary
    else:
        assert (verdict.status, verdict.bf16_step_ms) == ("fp8_slower", eager)


def test_a_modelled_speedup_is_no_error_and_passes_no_gate() -> None:
    known, lost = (msgspec.structs.replace(diagnose(facts), findings=()) for facts in alone("decoder_468m"))
    assert (known.reaches("error"), lost.reaches("error")) == (True, False)
    gate = Gate(min_speedup=1.0)
    assert [bool(gate.missed(each)) for each in (known, lost)] == [True, True]
    assert "no speedup of FP8 was measured" in gate.missed(lost)[0]


def test_bf16_of_another_gpu_is_not_modelled_beside_the_step() -> None:
    assumed = msgspec.structs.replace(alone("decoder_468m")[1], assumed_gpu="H100")
    assert diagnose(assumed).verdict.status == "not_measured"


def without_fp8() -> Facts:
    linears = tuple(
        msgspec.structs.replace(each, stack="torch", use="none", kind="torch.nn.modules.linear.Linear")
        for each in DECODER_468M.network.linears
    )
    return msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=linears)
    )


def test_a_model_without_fp8_is_told_what_fp8_would_give() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(88.3),
        "float8_rowwise": around(122.6),
    }
    facts = Of(arms).facts(without_fp8())
    verdict = diagnose(facts).verdict
    assert verdict.status == "no_fp8"
    assert verdict.speedup is None
    assert verdict.achievable_speedup == pytest.approx(1.05, abs=0.001)
    assert (
        "With FP8 (tensorwise, compiled) the step would take 88.3 ms, 1.05x of its best BF16 (92.7 ms)."
        in verdict.summary
    )
    best = best_bf16(facts)
    assert best is not None
    assert best.name == "bf16_compiled"


def test_a_cpu_says_nothing_about_a_gpu_and_an_unreliable_timing_says_so() -> None:
    assert "says nothing about a GPU" in diagnose(Of(SLOW, device="cpu").facts()).verdict.summary
    assert (
        "The timing is unreliable: the step timed against its own copy gives 1.100"
        in diagnose(Of(SLOW, reliable=False).facts()).verdict.summary
    )


def test_the_screen_shows_every_arm_with_its_time_and_why_one_has_none() -> None:
    screen = render(
        diagnose(Of({**SLOW, "bf16_compiled": "it raises BackendCompilerFailed: no compiler"}).facts())
    )
    assert "  FP8 as you run it  366.1 ± 0.2  20.0\n" in screen
    assert "  BF16               103.6 ± 0.2  20.0\n" in screen
    assert "  BF16 compiled      not timed: it raises BackendCompilerFailed: no compiler\n" in screen
    assert (
        "  Timed: 3 variants in turn on NVIDIA H200, the whole model, 31 s, a copy of BF16 came "
        "out at 1.000\n" in screen
    )
    assert "−278 ms a step, measured on NVIDIA H200" in screen
    assert "nothing was timed" not in screen


@pytest.mark.parametrize(
    ("own", "where"), [(True, "in a process of its own"), (False, "in your process, on copies of the model")]
)
def test_the_screen_says_where_the_trial_ran(own: bool, where: str) -> None:
    facts = Of(SLOW).facts()
    facts = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, own_process=own))
    assert f"The trial ran {where}." in " ".join(render(diagnose(facts)).split())


def test_what_helps_bf16_too_is_not_counted_for_fp8() -> None:
    arms = {
        "as_is": around(107.8),
        "bf16": around(131.0),
        "bf16_compiled": around(119.6),
        "prescribed": around(93.2),
    }
    without = {**arms, "bf16_without_checkpointing": around(98.1)}
    verdict = diagnose(Of(without, treatments=("checkpointing-off",), bases={}).facts()).verdict
    assert (
        "With checkpointing-off: 93.2 ms, 1.05x of BF16 with checkpointing off too (98.1 ms)."
        in verdict.summary
    )
    assert verdict.achievable_speedup == pytest.approx(1.053, abs=0.002)
    unknown = diagnose(Of(arms, treatments=("adapters-to-bf16", "compile-blocks"), bases={}).facts()).verdict
    assert "93.2 ms. BF16 would gain from adapters-to-bf16 too, which was not timed." in unknown.summary
    assert unknown.achievable_speedup is None


def test_staying_in_bf16_is_said_only_after_everything_was_tried_on_a_gpu() -> None:
    arms = {
        "as_is": around(120.0),
        "bf16": around(103.6),
        "bf16_compiled": around(92.7),
        "prescribed": around(99.0),
    }
    bases = {"prescribed": "as_is"}

    def stays(of: Of) -> bool:
        report = diagnose(of.facts())
        assert ("stay in BF16" in report.verdict.summary) == any(
            step.treatment.name == "stay-in-bf16" for step in report.prescription
        )
        return "stay in BF16" in report.verdict.summary

    assert stays(Of(arms, bases=bases))
    assert not stays(Of(arms, bases=bases, device="cpu"))
    assert not stays(Of({**arms, "prescribed": Reason.NO_TIME_LEFT}, bases=bases))
    assert stays(
        Of(
            {**arms, "recipe-rowwise": "it raises RuntimeError: no kernel"},
            bases={**bases, "recipe-rowwise": "prescribed"},
        )
    )


def test_little_to_gain_is_not_waited_for() -> None:
    """A variant that was left out may hide that FP8 pays, but not where it could give 2 % at most."""
    late = Arm(
        name="recipe-rowwise",
        treatments=("recipe-rowwise",),
        tried=False,
        why=Reason.NOT_EXPECTED_TO_FIT,
    )
    fp8 = profiled("as_is", 140.0, gemm_fp8=6.0, cast=34.0, attention=100.0)
    few, many = (
        profiled("bf16", 120.0, gemm_16bit=gemms_ms, attention=120.0 - gemms_ms) for gemms_ms in (8.0, 60.0)
    )
    assert stays_in_bf16(timed(DECODER_468M, fp8, few, late)) is not None
    assert stays_in_bf16(timed(DECODER_468M, fp8, many, late)) is None


def test_a_plan_that_may_save_nothing_promises_nothing() -> None:
    promising = Of(
        {"as_is": (42.0, 42.1, 42.2), "bf16": (50.0, 50.0, 50.0), "prescribed": (41.0, 41.0, 41.1)}
    ).facts()
    assert "With compile-blocks" in diagnose(promising).verdict.summary
    idle = Of(
        {"as_is": (42.0, 42.1, 42.2), "bf16": (50.0, 50.0, 50.0), "prescribed": (42.1, 42.0, 42.2)}
    ).facts()
    assert "With compile-blocks" not in diagnose(idle).verdict.summary


def test_the_screen_shows_what_the_trial_found_by_itself() -> None:
    arms = {**SLOW, "fused-optimizer": around(84.0)}
    total = Of(
        {**arms, "prescribed": around(84.0)},
        treatments=("compile-blocks", "fused-optimizer"),
        bases={"fused-optimizer": "prescribed_first"},
    )
    facts = total.facts()
    first = msgspec.structs.replace(
        next(arm for arm in Of(SLOW).facts().trial.arms if arm.name == "prescribed"),
        name="prescribed_first",
        base="as_is",
    )
    facts = msgspec.structs.replace(
        facts, trial=msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms, first))
    )
    screen = render(diagnose(facts))
    assert re.search(r"^2  fused-optimizer +−4.3 ms a step, measured on NVIDIA H200$", screen, re.M), screen
    assert "fused-optimizer is faster, timed with all else equal." in screen


def test_the_screen_says_what_did_not_fit_beside_the_others() -> None:
    facts = Of(SLOW).facts()
    arms = tuple(
        msgspec.structs.replace(arm, beside="bf16" if arm.name == "prescribed" else None)
        for arm in facts.trial.arms
    )
    screen = render(
        diagnose(msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms)))
    )
    assert "FP8 with fix 1 took turns with BF16 only." in " ".join(screen.split())


def test_fp8_that_was_asked_for_and_is_not_there_stays_so_when_the_model_was_timed() -> None:
    asked = msgspec.structs.replace(DECODER_468M.environment, variables={"ACCELERATE_MIXED_PRECISION": "fp8"})
    seen = msgspec.structs.replace(DECODER_468M.training, gradients_seen=True)
    base = msgspec.structs.replace(without_fp8(), environment=asked, training=seen)
    verdict = diagnose(Of({"as_is": around(103.6), "bf16_compiled": around(92.7)}).facts(base)).verdict
    assert verdict.status == "fp8_not_engaged"
    assert verdict.step_ms == 103.6
    assert "This model uses no FP8" not in verdict.summary


def test_slower_fp8_that_no_check_explains_is_not_called_fine() -> None:
    arms = {"as_is": around(38.0), "bf16": around(29.9)}
    compiled = tuple(msgspec.structs.replace(each, compiled="") for each in DECODER_468M.network.linears)
    base = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=compiled), gpus=(GPU,)
    )
    screen = render(diagnose(Of(arms).facts(base)))
    assert "FP8 is slower than BF16 here, and no check of this version explains why." in screen
    assert "Nothing was found" not in screen


EXPLORED = {
    **SLOW,
    "prescribed": around(80.0),
    "prescribed_first": around(88.3),
    "recipe-rowwise": around(80.0),
}
"""The trial found a recipe on top of what a finding proposed."""
BASES = {"prescribed_first": "as_is", "recipe-rowwise": "prescribed_first", "compile-blocks": "as_is"}


def explored(
    treatments: tuple[str, ...] = ("compile-blocks", "recipe-rowwise"), **arms: tuple[float, ...] | str
) -> Facts:
    return Of({**EXPLORED, **arms}, treatments=treatments, bases=BASES).facts()


def test_what_the_trial_found_joins_the_plan_with_what_it_saved_on_top_of_its_base() -> None:
    plan = diagnose(explored(), select=["CMP001"]).prescription
    assert [step.treatment.name for step in plan] == ["compile-blocks", "recipe-rowwise"]
    found = plan[1]
    assert found.saving_ms is not None
    assert (found.code, found.saving_ms.basis, round(found.saving_ms.middle, 1)) == ("", "measured", 8.3)
    assert 'from_recipe_name("rowwise")' in found.treatment.code


def test_a_treatment_is_weighed_on_top_of_its_base() -> None:
    findings = (
        Finding(
            title="t",
            explanation="e",
            code="SHP005",
            treatment=Treatment(name="recipe-rowwise", summary="s", code="c"),
        ),
    )
    ((weighed,), _) = with_measured_savings(explored(), findings, ())
    assert weighed.saving_ms is not None
    assert round(weighed.saving_ms.middle, 1) == 8.3
    own = msgspec.structs.replace(findings[0], saving_ms=Saving(low=1.0, high=2.0, basis="measured"))
    assert with_measured_savings(explored(), (own,), ())[0] == (own,)


def test_what_was_timed_and_left_out_of_the_total_is_not_prescribed() -> None:
    plan = diagnose(
        explored(treatments=("recipe-rowwise",), **{"compile-blocks": around(300.0)})
    ).prescription
    assert [step.treatment.name for step in plan] == ["recipe-rowwise"]


TOO_LARGE = "its step takes 93.4 GiB at full depth"


def with_too_large(facts: Facts, *names: str) -> Facts:
    """The same trial, in which these arms take more memory than there is."""
    arms = tuple(
        msgspec.structs.replace(each, tried=False, why=Reason.DOES_NOT_FIT, reason=TOO_LARGE)
        if each.name in names
        else each
        for each in facts.trial.arms
    )
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))


def test_a_fix_that_does_not_fit_is_not_prescribed_and_its_finding_says_so() -> None:
    facts = with_too_large(
        Of({**SLOW, "compile-blocks": around(90.0)}, bases={"compile-blocks": "as_is"}).facts(),
        "prescribed",
        "compile-blocks",
    )
    report = diagnose(facts, select=["CMP001"])
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]
    (finding,) = report.findings
    assert (finding.treatment, finding.saving_ms) == (None, None)
    assert finding.explanation.endswith(f"is not prescribed: {TOO_LARGE}.")
    assert TOO_LARGE in render(report)


def test_of_fixes_that_do_not_fit_together_none_is_prescribed_but_the_total_that_fits() -> None:
    plan = diagnose(with_too_large(Of(SLOW, bases={}).facts(), "prescribed")).prescription
    assert "compile-blocks" not in [step.treatment.name for step in plan]
    proposed = tuple(
        Step(code="", mends=(), title="t", treatment=Treatment(name=name, summary="s", code="c"))
        for name in ("compile-blocks", "larger-batch", "cache-off")
    )
    together = Of({**SLOW, "prescribed": TOO_LARGE}, treatments=("compile-blocks", "larger-batch"), bases={})
    (first,) = (each for each in together.facts().trial.arms if each.name == "prescribed")
    known = msgspec.structs.replace(first, name="prescribed_first", why=Reason.DOES_NOT_FIT)
    best = Of(SLOW, treatments=("compile-blocks",), bases={}).facts()
    trial = msgspec.structs.replace(best.trial, arms=(*best.trial.arms, known))
    held = as_timed(proposed, msgspec.structs.replace(best, trial=trial))
    assert [step.treatment.name for step in held] == ["compile-blocks", "cache-off"]


def test_fp8_that_stays_slower_ends_the_plan_with_bf16() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(100.0)}, bases={}).facts())
    assert [step.treatment.name for step in report.prescription] == ["compile-blocks", "stay-in-bf16"]
    assert report.verdict.summary.endswith(
        "With compile-blocks: 100.0 ms, 0.93x of BF16. Nothing that was tried makes FP8 as fast: "
        "stay in BF16."
    )
    last = report.prescription[-1].saving_ms
    assert last is not None
    assert round(last.middle, 1) == 7.3


STAYING: dict[str, tuple[tuple[float, float], Facts, str, str]] = {
    "compiled": (
        (103.6, 92.7),
        DECODER_468M,
        "stay in BF16, compiled: ",
        "for block in model.blocks:\n    block.compile()",
    ),
    "eager is best": ((92.7, 95.0), DECODER_468M, "stay in BF16: ", ""),
    "with a cache": (
        (103.6, 92.7),
        msgspec.structs.replace(
            DECODER_468M,
            training=msgspec.structs.replace(DECODER_468M.training, use_cache=True, cache_switch=""),
        ),
        "stay in BF16, compiled: ",
        "for block in model.blocks:\n    block.compile()\nmodel.config.use_cache = False",
    ),
    "without blocks": (
        (103.6, 92.7),
        msgspec.structs.replace(
            DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, blocks=())
        ),
        "stay in BF16, compiled: ",
        "model = torch.compile(model)",
    ),
}


@pytest.mark.parametrize(("bf16", "base", "summary", "lines"), STAYING.values(), ids=STAYING)
def test_the_plan_stays_in_the_bf16_that_was_fastest(
    bf16: tuple[float, float], base: Facts, summary: str, lines: str
) -> None:
    eager, compiled = map(around, bf16)
    arms = {**SLOW, "bf16": eager, "bf16_compiled": compiled, "prescribed": around(100.0)}
    last = diagnose(Of(arms, bases={}).facts(base)).prescription[-1].treatment
    assert last.summary.startswith(summary)
    assert last.code == "\n".join(filter(None, ["# leave out the conversion to FP8", lines]))


@pytest.mark.parametrize(
    ("own_ms", "summary", "lines"),
    [
        (80.0, "stay in BF16, under your own torch.compile: ", "# leave your own torch.compile as it is"),
        (
            99.0,
            "stay in BF16, compiled: ",
            "# leave out your own torch.compile\nfor block in model.blocks:\n    block.compile()",
        ),
    ],
    ids=["his own is best", "block by block is best"],
)
def test_fp8_is_judged_against_the_users_own_form_of_bf16(own_ms: float, summary: str, lines: str) -> None:
    arms = {**SLOW, "as_is": around(102.0), "bf16_as_compiled": around(own_ms), "prescribed": around(101.0)}
    facts = Of(arms, bases={}).facts()
    report, best_ms = diagnose(facts), min(own_ms, 92.7)
    assert report.verdict.bf16_step_ms == best_ms
    assert report.verdict.speedup == pytest.approx(best_ms / 102.0, abs=0.005)
    last = report.prescription[-1].treatment
    assert last.summary.startswith(summary)
    assert last.code == f"# leave out the conversion to FP8\n{lines}"
    assert "  BF16 compiled your way" in render(report)


def test_the_faster_form_of_a_conversion_stands_and_says_which_it_is() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(92.7),
        "float8_tensorwise": around(88.3),
        "float8_tensorwise_as_compiled": around(80.0),
    }
    report = diagnose(Of(arms).facts(without_fp8()))
    assert "With FP8 (tensorwise, under your own torch.compile) the step would take 80.0" in (
        report.verdict.summary
    )
    assert "  FP8 tensorwise compiled your way" in render(report)


def test_arms_of_different_windows_are_compared_as_widely_as_both_allow() -> None:
    one = Arm(name="a", rounds_ms=(9.0, 10.0, 10.0, 10.0, 10.0, 11.0))
    other = Arm(name="b", rounds_ms=(19.0, 19.5, 20.0, 20.0, 20.0, 20.5, 21.0))
    compared = ratio(one, other)
    assert compared.median == 0.5
    assert compared.low <= 9 / 20.5
    assert compared.high >= 11 / 20


def test_arms_of_the_first_window_are_not_shown_twice() -> None:
    screen = render(diagnose(explored()))
    assert screen.count("FP8 with fixes 1 and 2   80.0 ± 0.2  20.0\n") == 1
    assert "prescribed" not in screen


def test_fp8_that_never_ran_is_told_what_it_would_give() -> None:
    arms = {"as_is": Reason.NO_FP8_GEMM, "bf16_compiled": around(92.7), "te-autocast": around(88.3)}
    assert (
        "Once it runs: 88.3 ms, 1.05x of BF16."
        in diagnose(Of(arms, bases={"te-autocast": "as_is"}).facts()).verdict.summary
    )


LOSING = Finding(
    title="t",
    explanation="e",
    code="SHP002",
    severity="warning",
    treatment=Treatment(name="stay-in-bf16", summary="s", code="c"),
    saving_ms=Saving(low=9.0, high=9.0, basis="modelled", gpu="H200"),
)
EAGER = Finding(
    title="t",
    explanation="e",
    code="CMP001",
    severity="warning",
    treatment=Treatment(name="compile-blocks", summary="s", code="c"),
)
EVEN_FP8 = Of({**SLOW, "prescribed": around(92.7)}, bases={"prescribed": "as_is"})


@pytest.mark.parametrize(("prescribed", "saved"), [(100.0, 7.3), (88.3, -4.4)])
def test_staying_in_bf16_is_weighed_by_the_best_of_both(prescribed: float, saved: float) -> None:
    saving = with_measured_savings(Of({**SLOW, "prescribed": around(prescribed)}).facts(), (LOSING,), ())[0][
        0
    ].saving_ms
    assert saving is not None
    assert round(saving.middle, 1) == saved


def test_staying_in_bf16_saves_nothing_of_a_model_without_fp8() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(99.0),
    }
    assert with_measured_savings(Of(arms).facts(without_fp8()), (LOSING,), ())[0] == (LOSING,)


@pytest.mark.parametrize(
    ("facts", "findings", "names"),
    [
        (DECODER_468M, (LOSING, EAGER), ["stay-in-bf16"]),
        (DECODER_468M, (LOSING,), ["stay-in-bf16"]),
        (
            DECODER_468M,
            (LOSING, msgspec.structs.replace(EAGER, code="MEM001")),
            ["stay-in-bf16", "compile-blocks"],
        ),
        (EVEN_FP8.facts(), (LOSING, EAGER), ["compile-blocks"]),
        (
            Of({**SLOW, "prescribed": around(100.0)}).facts(),
            (LOSING, EAGER),
            ["compile-blocks", "stay-in-bf16"],
        ),
    ],
    ids=[
        "no trial",
        "nothing else",
        "nothing else of FP8's own",
        "even once prescribed",
        "slower even as prescribed",
    ],
)
def test_fp8_is_never_mended_and_given_up_in_one_plan_unless_that_was_measured(
    facts: Facts, findings: tuple[Finding, ...], names: list[str]
) -> None:
    assert [step.treatment.name for step in as_timed(prescribe(findings, facts), facts)] == names


@pytest.mark.parametrize(
    ("patient", "broken"),
    [("accelerate_eager", ["MOD007"]), ("nf4_base", []), ("setting_without_effect", ["MOD007"])],
)
def test_recordings_whose_layers_all_lose_are_not_told_to_mend_fp8_and_to_give_it_up(
    patient: str, broken: list[str]
) -> None:
    """But layers that do not learn are mended whatever their speed, and first."""
    report = load_report(RECORDED / f"h200-{patient}.json")
    losing = next(each for each in report.findings if each.code == "SHP002")
    assert losing.treatment is not None
    first, others = report.prescription[: len(broken)], report.prescription[len(broken) :]
    assert [step.code for step in first] == broken
    assert losing.treatment.name == others[0].treatment.name == "stay-in-bf16"
    changing = {check.code for check in registry.discover() if check.changes_fp8}
    assert not changing.intersection(code for step in others[1:] for code in step.mends)


def test_what_a_plan_in_bf16_leaves_out_is_timed_all_the_same() -> None:
    report = load_report(RECORDED / "h200-accelerate_eager.json")
    assert "compile-blocks" not in [step.treatment.name for step in report.prescription]
    assert "compile-blocks" in [step.treatment.name for step in hypotheses(report.facts)]


def test_variants_without_a_time_for_one_reason_stand_in_one_line() -> None:
    late = "the budget of 60 s was used up before it"
    screen = render(
        diagnose(explored(**dict.fromkeys(("cache-off", "recipe-tensorwise", "fused-optimizer"), late)))
    )
    assert re.search(f"  3 more variants +not timed: {late.removesuffix('it')}them\n", screen)
    assert screen.count("not timed") == 1
