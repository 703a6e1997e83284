"""Where a plan ends: in BF16 if FP8 cannot win, timed or estimated, and in no step that is not finite."""

from typing import Literal

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.treatment_table import MORE_TOKENS, STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.step_cost import with_each, with_recipe
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import NOT_RECORDED, Facts
from fp8doctor.facts.arm_names import Reason
from tests.diagnosis.trials import Of, around, compiled_by_block, without_fp8
from tests.facts_of import DECODER_468M
from tests.replays import JOBS, TESTS, of


def narrow() -> Facts:
    """The decoder with layers whose casts cost more than their matmuls save in any recipe, by the model."""
    sides = {"in_features": 256, "out_features": 256}
    return with_each(DECODER_468M, lambda each: replace(each, **sides) if each.use == "training" else each)


@pytest.mark.parametrize("batch", ["given", "made up"])
@pytest.mark.parametrize("compiled", [True, False])
def test_fp8_that_the_cost_model_expects_to_lose_is_left_off(
    compiled: bool, batch: Literal["given", "made up"]
) -> None:
    """Also if compiling it makes it faster, as long as it loses; not if another recipe may win."""
    plans = []
    for facts in (narrow(), with_recipe(DECODER_468M, "rowwise")):
        facts = replace(compiled_by_block(facts) if compiled else facts, assumed_gpu="H100")
        plan = diagnose(of_batch(facts, batch)).prescription
        plans.append([step.treatment.name for step in plan])
    assert plans[0] == [STAY_IN_BF16]
    assert plans[1] == ["recipe-tensorwise", *([] if compiled else ["compile-blocks"])]


def test_a_plan_that_ends_in_compiled_bf16_with_a_change_compiles() -> None:
    arms = {"as_is": around(100.0), "bf16_prescribed": around(70.0), "bf16_compiled": Reason.NO_TIME_LEFT}
    facts = Of(arms, bases={"bf16_prescribed": "bf16_compiled"}).facts(without_fp8())
    rows = [
        replace(each, treatments=("fused-optimizer",)) if each.name == "bf16_prescribed" else each
        for each in facts.trial.arms
    ]
    plan = diagnose(replace(facts, trial=replace(facts.trial, arms=(*rows,)))).prescription
    assert {step.treatment.name for step in plan} == {"compile-blocks", "fused-optimizer"}


@pytest.mark.slow
def test_a_job_gets_the_same_plan_whoever_made_its_batch() -> None:
    """But for advice about the batch itself, which only its owner can use."""
    same, differ = 0, {}
    for path in JOBS:
        facts = replace(read_saved(path)[0], trial=NOT_RECORDED, observed=NOT_RECORDED)
        if facts.get("workload.batch_source") is None:
            continue
        given, made = (
            [step.treatment.name for step in diagnose(of_batch(facts, source)).prescription]
            for source in ("given", "made up")
        )
        if {MORE_TOKENS, "pad-tokens"}.isdisjoint(given):
            same += given == made
            differ |= {path.name: (given, made)} if given != made else {}
    assert differ == {}
    assert same >= 120


def of_batch(facts: Facts, source: Literal["given", "made up"]) -> Facts:
    return replace(facts, workload=replace(facts.workload, batch_source=source))


def with_nan_in(facts: Facts, **found: tuple[str, ...]) -> Facts:
    """The trial with these findings about loss and gradients of its steps."""
    arms = (
        replace(each, non_finite=found.get(each.name, ())) if each.tried else each
        for each in facts.trial.arms
    )
    return replace(facts, trial=replace(facts.trial, arms=tuple(arms)))


@pytest.mark.parametrize("now", [(), ("loss", "gradients")], ids=["finite as it is", "NaN as it is"])
def test_no_plan_ends_in_a_step_that_is_not_finite(now: tuple[str, ...]) -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(120.0),
        "bf16_compiled": around(100.0),
        "prescribed": around(80.0),
    }
    facts = with_nan_in(Of(arms, bases={}).facts(), as_is=now, prescribed=("gradients",))
    end = TrialView(facts).end
    assert end is not None
    assert end.arm.name == "bf16_compiled"
    report = diagnose(facts)
    assert [step.treatment.name for step in report.prescription] == [STAY_IN_BF16]
    assert report.verdict.best_variant == "bf16_compiled"
    assert report.verdict.achievable_speedup is None


def test_a_job_whose_steps_are_all_not_finite_keeps_its_own() -> None:
    """The one finite BF16 has a change that FP8 had no time for."""
    facts = of("shared_gpu", "h200-checkpointed_needlessly").report.facts
    end = TrialView(with_nan_in(facts, as_is=("loss",), bf16_compiled=("loss",))).end
    assert end is not None
    assert end.is_as_is


def test_fp8_stays_while_nothing_estimates_the_whole_step() -> None:
    """Its layers alone look slower in FP8, and most of the model is no Linear."""
    facts = load_report(TESTS / "running" / "recorded" / "h200-plain_small.json.gz").facts
    assert STAY_IN_BF16 in {step.treatment.name for step in diagnose(facts).prescription}
    unknown = replace(facts, network=replace(facts.network, parameters=100 * facts.network.parameters))
    report = diagnose(unknown)
    assert "SHP002" in {each.code for each in report.findings}
    assert report.verdict.status == "open"
    assert STAY_IN_BF16 not in {step.treatment.name for step in report.prescription}
