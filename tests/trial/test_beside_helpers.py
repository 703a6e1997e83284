"""A trial beside helpers that compile ahead of it, and may lose their GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp8doctor.facts.arm_names import Reason
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.early import is_for_others
from fp8doctor.trial.measure.ahead import Nobody, Work
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.variant import ArmPlan, Variant, as_it_is
from tests.trial.decoder import AS_IS, BF16, CPU, PRESCRIBED, Decoder, job

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


COMPILED_BF16 = ArmPlan("bf16_compiled", as_it_is, fp8=False, compiled=True)


@pytest.mark.parametrize(
    ("compiled", "as_one", "ahead"),
    [
        (None, False, ["prescribed"]),
        ("blocks", False, ["bf16_compiled", "prescribed"]),
        ("step", False, ["bf16_compiled", "prescribed"]),
        ("blocks", True, ["as_is", "bf16_compiled", "prescribed"]),
    ],
)
def test_bf16_is_compiled_beside_a_step_that_compiles_itself(
    compiled: str | None, as_one: bool, ahead: list[str]
) -> None:
    """One that does not is through before a helper has loaded the model."""
    of = job(blocks=3)
    if compiled == "blocks":
        for block in of.model.blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
    elif compiled == "step":
        of = replace(of, training_step=torch.compile(lambda model, batch: model(batch).mean()))
    plans = (AS_IS, BF16, COMPILED_BF16, PRESCRIBED)
    assert [plan.name for plan in plans if is_for_others(plan, of, as_one=as_one)] == ahead


class OneHelper(Nobody):
    """There until it is ended."""

    ended = 0

    def end(self) -> bool:
        self.ended += 1
        return self.ended == 1

    give_way = end

    def outcomes(self) -> dict[str, float | None]:
        return {"bf16_compiled": 8.0, "prescribed": None}


class LosesItsGpu(Nobody):
    """One arm cost it its GPU."""

    def lost(self, arm: str) -> str | None:
        return "it took the GPU's context down" if arm == "b" else None


@pytest.mark.parametrize(
    ("name", "compiled_ahead", "ended_before"),
    [
        ("float8_tensorwise", {}, True),
        ("recipe-rowwise", {"c": None}, True),
        ("recipe-rowwise", {"c": 8.0}, False),
        ("fused-optimizer", {}, False),
        ("bf16_compiled", {}, False),
        ("as_is", {}, False),
    ],
)
def test_nothing_is_compiled_ahead_of_a_trial_that_finds_its_variants_in_the_caches(
    name: str, compiled_ahead: dict[str, float | None], ended_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forms of the job itself may be there from its own training, and other changes keep its graphs."""
    others, ended = OneHelper(), set[bool]()
    monkeypatch.setattr(others, "outcomes", lambda: compiled_ahead)

    def noted(variant: Variant) -> Variant:
        ended.add(others.ended > 0)
        return variant

    of = Bench.build

    def built(self: Bench, attempt: Attempt, until: float = math.inf) -> None:
        of(self, attempt, until)
        for ready in attempt.ready:
            ready.compiled.from_caches = attempt.plan.name == name

    monkeypatch.setattr(Bench, "build", built)
    plans = [ArmPlan("as_is", as_it_is)] if name != "as_is" else []
    plans += [ArmPlan(name, as_it_is), ArmPlan("c", noted, base="as_is")]
    conduct(job(), ["blocks"], plans, TrialRun(CPU, Budget(600.0), ahead=others))
    assert ended == {ended_before}


@pytest.mark.parametrize(("budget_s", "others"), [(600.0, None), (1e-3, "no_time_left")])
def test_what_cost_another_process_its_gpu_is_not_built_here(budget_s: float, others: str | None) -> None:
    """The trial would begin again in a new process. It is the reason also where no time was left."""
    plans = [ArmPlan("as_is", as_it_is), ArmPlan("b", as_it_is, base="as_is"), ArmPlan("c", as_it_is)]
    run = TrialRun(CPU, Budget(budget_s), ahead=LosesItsGpu())
    found = conduct(job(), ["blocks"], plans, run)
    assert [(arm.name, arm.tried, arm.why) for arm in found.arms] == [
        ("as_is", others is None, others),
        ("b", False, "took_process_down"),
        ("c", others is None, others),
    ]
    assert found.arms[1].reason == "it took the GPU's context down"


class LosesItsGpuMeanwhile(LosesItsGpu):
    """It does so while the trial waits for it."""

    def __init__(self) -> None:
        self.waited_for: set[str] = set()

    def take(self, work: Work, patience_s: float | None) -> float | None:
        self.waited_for.add(work[0])
        return None

    def lost(self, arm: str) -> str | None:
        return super().lost(arm) if arm in self.waited_for else None


def test_what_costs_another_process_its_gpu_while_it_is_waited_for_is_not_built_here() -> None:
    def building(variant: Variant) -> Variant:
        raise AssertionError("it is built")

    plans = [ArmPlan("as_is", as_it_is), ArmPlan("b", building, base="as_is"), ArmPlan("c", as_it_is)]
    run = TrialRun(CPU, Budget(600.0), ahead=LosesItsGpuMeanwhile())
    found = conduct(job(), ["blocks"], plans, run)
    assert [(arm.name, arm.why) for arm in found.arms] == [
        ("as_is", None),
        ("b", Reason.TOOK_PROCESS_DOWN),
        ("c", None),
    ]


def test_a_step_that_raises_beside_helpers_is_tried_without_them() -> None:
    """cuBLAS and the driver have other words for a full GPU than torch's own exception."""

    class WithoutRoom(Decoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not helper.ended:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
            return super().forward(x)

    helper = OneHelper()
    run = TrialRun(CPU, Budget(600.0), ahead=helper)
    found = conduct(job(model=WithoutRoom(3)), ["blocks"], [ArmPlan("as_is", as_it_is)], run)
    assert [(arm.name, arm.tried) for arm in found.arms] == [("as_is", True)]
    assert found.compiled_ahead == helper.outcomes()
