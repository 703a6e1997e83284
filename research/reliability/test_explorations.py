"""Everything that a trial tries unasked runs on a real LoRA job, and proves what its name says."""

from __future__ import annotations

import pytest
import torch

from fp8doctor.diagnosis.document import Step
from fp8doctor.examine import examine
from fp8doctor.finding import Treatment
from fp8doctor.trial.copies.step import Place
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import plan_variants
from tests.examine.models import llama, lora
from tests.trial.conducted import conduct
from tests.trial.test_planning import float8, job

EXPLORED = {"checkpointing-off": "prescribed", "bf16_with_checkpointing-off": "bf16_prescribed"}


@pytest.mark.nightly
def test_every_exploration_runs_and_proves_what_it_says() -> None:
    model = lora(llama().bfloat16())
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model = float8(model)
    of = job(model, optimizer=torch.optim.AdamW(model.parameters()))
    facts = examine(of)
    planned = plan_variants(facts, [], of)
    explored = {each.name: each.base for each in planned if each.explored}
    assert explored == EXPLORED
    freed = [each.name for each in planned if each.place is Place.NO_CHECKPOINTING]
    assert freed == ["bf16_with_checkpointing-off", "checkpointing-off"]
    cure = Treatment(name="adapters-to-bf16", summary="s", code="c")
    steps = [Step(code="AAA001", mends=("AAA001",), title="t", treatment=cure)]
    tried = [
        plan
        for plan in plan_variants(facts, steps, of)
        if plan.name not in ("bf16_compiled", "bf16_again") and not plan.if_host_waits
    ]
    result = conduct(of, ["base_model.model.model.layers"], tried, TrialRun(torch.device("cpu"), Budget(600)))
    timed = {arm.name: arm for arm in result.arms}
    assert {arm.name: arm.reason for arm in result.arms if not arm.tried} == {}
    assert set(timed) >= {"as_is", "bf16", "bf16_prescribed", "prescribed", *EXPLORED}
    assert timed["prescribed"].treatments == ("adapters-to-bf16", "fused-optimizer")
    gemms = {name: timed[name].fp8_gemms for name in ("as_is", "prescribed", *EXPLORED)}
    recomputed = gemms["as_is"]
    assert recomputed is not None
    assert gemms["checkpointing-off"] < recomputed
    assert gemms["bf16_with_checkpointing-off"] == 0
    assert gemms["prescribed"] == recomputed
