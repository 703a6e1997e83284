"""A failure costs one arm, and one of the step itself is the trial's reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8doctor.facts.arm_names import Reason
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.measure import bench, timer
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.treatments.apply import NotTried
from fp8doctor.trial.variant import Variant, VariantPlan, as_it_is
from tests.trial.conducted import conduct
from tests.trial.decoder import AS_IS, BF16, CPU, job, run, trial
from tests.trial.planted import explored, failing, worn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


@pytest.mark.gate("error0-raises-it raises RuntimeError: shapes differ")
@pytest.mark.parametrize(
    ("error", "why", "reason"),
    [
        (RuntimeError("shapes differ\nand more"), Reason.RAISES, "it raises RuntimeError: shapes differ"),
        (torch.OutOfMemoryError("CUDA out of memory"), Reason.OUT_OF_MEMORY, "too little memory left for it"),
        (NotTried("torchao cannot be imported"), Reason.NOT_APPLICABLE, "torchao cannot be imported"),
        (NotReplicable("it is sharded"), Reason.NOT_REPLICABLE, "it is sharded"),
    ],
)
def test_an_arm_that_fails_costs_itself_only(error: Exception, why: Reason, reason: str) -> None:
    arms = run(job(blocks=3), AS_IS, failing(error), BF16)
    assert (arms["failing"].tried, arms["as_is"].tried, arms["bf16"].tried) == (False, True, True)
    assert (arms["failing"].why, arms["bf16"].why) == (why, None)
    assert reason in (arms["failing"].reason or "")


def test_a_step_that_takes_too_much_memory_is_timed_at_shallower_cuts() -> None:
    """Its first step fits, and the compiled one, beside the copies of the other cut, does not."""
    fits = job(blocks=26)

    def make(variant: Variant) -> Variant:
        if len(variant.model.blocks) > 6:  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return variant

    found = trial(fits, VariantPlan("as_is", make, fp8=None), BF16)
    assert [(arm.name, arm.why) for arm in found.arms] == [("as_is", None), ("bf16", None)]
    assert [dict(cut.blocks) for cut in found.arms[0].cuts] == [{"blocks": 2}, {"blocks": 6}]


def test_an_arm_without_its_proof_has_no_number() -> None:
    arms = run(
        job(blocks=3), VariantPlan("as_is", BF16.make, fp8=True), VariantPlan("bf16", as_it_is, fp8=False)
    )
    assert (arms["as_is"].why, arms["bf16"].why) == (Reason.NO_FP8_GEMM, Reason.FP8_IN_BF16)
    assert arms["as_is"].reason == "no FP8 matmul was seen in its step"
    assert arms["bf16"].reason == "18 FP8 matmuls were seen in a BF16 step"
    assert not arms["as_is"].tried


def test_an_arm_that_keeps_compiling_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_WARM_UP", 3)

    def make(variant: Variant) -> Variant:
        inner, count = torch.compile(lambda x: x + 1, dynamic=False, backend="eager"), [8]
        forward = variant.model.forward

        def growing(tokens: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            inner(torch.zeros(count[0]))
            return forward(tokens)

        variant.model.forward = growing  # type: ignore[method-assign]
        return variant

    arm = run(job(blocks=3), VariantPlan("as_is", make))["as_is"]
    assert (arm.why, arm.reason) == (Reason.STILL_COMPILING, "it was still compiling while it was timed")


def test_a_step_that_raises_is_the_trials_reason() -> None:
    result = trial(job(loss=lambda output, batch: output.nonsense), AS_IS)
    assert (result.arms, result.why) == ((), Reason.STEP_RAISES)
    assert "the training step raises AttributeError" in (result.reason or "")


def test_a_recompute_that_saves_other_tensors_is_told_apart() -> None:
    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        calls: list[None] = []

        def changing(given: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return given.exp().sin() if len(calls) == 1 else given * 2

        made: torch.Tensor = checkpoint(changing, output.float(), use_reentrant=False)  # type: ignore[no-untyped-call]
        return made.mean()

    result = trial(job(loss=loss), AS_IS)
    assert result.why is Reason.RECOMPUTE_DIFFERS
    assert (result.reason or "").startswith("the training step raises CheckpointError")


def test_a_variant_that_fails_while_it_is_timed_costs_itself_only() -> None:
    result = trial(job(blocks=3), AS_IS, worn())
    arms = {arm.name: arm for arm in result.arms}
    assert result.why is None
    assert len(arms["as_is"].rounds_ms) == timer.LEAST_ROUNDS
    assert (arms["worn"].tried, arms["worn"].why) == (False, Reason.RAISES)
    assert arms["worn"].reason == "it raises RuntimeError: worn out"


def test_what_changes_a_variant_that_failed_is_not_built() -> None:
    told: list[str | None] = []
    broken = replace(failing(RuntimeError("broken")), name="prescribed", treatments=("compile-blocks",))
    on_top = explored("recipe-rowwise", as_it_is, broken)
    of = TrialRun(CPU, Budget(600.0), progress=lambda text, arm: told.append(arm))
    result = conduct(job(blocks=3), ("blocks",), (AS_IS, broken, on_top), of)
    arms = {arm.name: arm for arm in result.arms}
    assert "recipe-rowwise" not in told
    assert (arms["recipe-rowwise"].why, arms["recipe-rowwise"].reason) == (
        Reason.RAISES,
        "it changes FP8 with all fixes, which has no time",
    )


def test_a_frozen_model_is_no_fault_of_its_step() -> None:
    frozen = job(blocks=3)
    frozen.model.requires_grad_(False)
    assert trial(frozen, AS_IS).reason == "no parameter of the model is trained, so there is no step to time"


def test_an_optimizer_that_needs_a_closure_is_no_fault_of_the_step() -> None:
    found = job(blocks=3)
    closed = replace(found, optimizer=torch.optim.LBFGS(found.model.parameters()))
    assert trial(closed, AS_IS).reason == (
        "its optimizer LBFGS takes a closure, and the steps that are timed give it none"
    )
