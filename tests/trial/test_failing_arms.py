"""A failure costs one arm, and one of the step itself is the trial's reason."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.copies.step import Variant, VariantPlan, as_it_is
from fp8doctor.trial.measure import bench, timer
from fp8doctor.trial.treatments.apply import NotTried
from tests.trial.decoder import AS_IS, BF16, job, run, trial
from tests.trial.planted import failing, worn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


def test_an_arm_that_fails_costs_itself_and_what_is_built_on_it() -> None:
    errors = {
        Reason.RAISES: RuntimeError("shapes differ\nand more"),
        Reason.OUT_OF_MEMORY: torch.OutOfMemoryError("CUDA out of memory"),
        Reason.NOT_APPLICABLE: NotTried("torchao cannot be imported"),
        Reason.NOT_REPLICABLE: NotReplicable("it is sharded"),
    }
    broken = [replace(failing(error), name=why.name, treatments=("x",)) for why, error in errors.items()]
    on_top = VariantPlan(
        "on_top", lambda variant: pytest.fail("it is built"), ("y",), True, "RAISES", explored=True
    )
    arms = run(job(blocks=3), AS_IS, *broken, on_top, worn(), BF16)
    assert {name: arm.why for name, arm in arms.items()} == {
        **{why.name: why for why in errors},
        **dict.fromkeys(("as_is", "bf16"), None),
        **dict.fromkeys(("on_top", "worn"), Reason.RAISES),
    }
    assert len(arms["as_is"].rounds_ms) == timer.LEAST_ROUNDS
    assert arms["RAISES"].reason == "it raises RuntimeError: shapes differ"
    assert arms["worn"].reason == "it raises RuntimeError: worn out", "while it was timed"
    assert "which has no time" in (arms["on_top"].reason or "")


def test_a_step_that_takes_too_much_memory_is_timed_at_shallower_cuts() -> None:
    """Its first step fits, and the compiled one, beside the copies of the other cut, does not."""

    def make(variant: Variant) -> Variant:
        if len(variant.model.blocks) > 6:  # type: ignore[arg-type]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return variant

    found = trial(job(blocks=26), VariantPlan("as_is", make, fp8=None), BF16)
    assert [(arm.name, arm.why) for arm in found.arms] == [("as_is", None), ("bf16", None)]
    assert [dict(cut.blocks) for cut in found.arms[0].cuts] == [{"blocks": 2}, {"blocks": 6}]


def test_an_arm_without_its_proof_has_no_number() -> None:
    arms = run(
        job(blocks=3), VariantPlan("as_is", BF16.make, fp8=True), VariantPlan("bf16", as_it_is, fp8=False)
    )
    assert (arms["as_is"].why, arms["bf16"].why) == (Reason.NO_FP8_GEMM, Reason.FP8_IN_BF16)
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

    assert run(job(blocks=3), VariantPlan("as_is", make))["as_is"].why is Reason.STILL_COMPILING


def recomputed_otherwise(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """A loss whose recomputation saves other tensors."""
    calls: list[None] = []

    def changing(given: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return given.exp().sin() if len(calls) == 1 else given * 2

    made: torch.Tensor = checkpoint(changing, output.float(), use_reentrant=False)  # type: ignore[no-untyped-call]
    return made.mean()


def frozen(of: Job) -> Job:
    of.model.requires_grad_(False)
    return of


@pytest.mark.parametrize(
    ("change", "reason", "why"),
    [
        (
            lambda of: replace(of, loss=lambda output, batch: output.nonsense),
            "the training step raises AttributeError",
            Reason.STEP_RAISES,
        ),
        (
            lambda of: replace(of, loss=recomputed_otherwise),
            "the training step raises CheckpointError",
            Reason.RECOMPUTE_DIFFERS,
        ),
        (frozen, "no parameter of the model is trained", None),
        (
            lambda of: replace(of, optimizer=torch.optim.LBFGS(of.model.parameters())),
            "its optimizer LBFGS takes a closure",
            None,
        ),
    ],
    ids=["raises", "recomputes otherwise", "is frozen", "needs a closure"],
)
def test_a_step_that_cannot_be_timed_is_the_trials_reason(
    change: Callable[[Job], Job], reason: str, why: Reason | None
) -> None:
    found = trial(change(job(blocks=3)), AS_IS)
    assert (found.arms, (found.reason or "").startswith(reason)) == ((), True)
    assert why is None or found.why is why
