"""AMD's GPUs, whose speedups are bounded only."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch
from torch import nn

import fp8doctor
from fp8doctor import Plan
from tests.configurations import LLAMA_8B
from tests.schema import PLAN

PUBLISHED = {"tensorwise": 6166.0 / 5376.5, "rowwise": 5891.0 / 5376.5, "rowwise_with_gw_hp": 6100.0 / 5376.5}
"""Tokens/s of a Llama 3 8B on eight MI300X, 8192 tokens, with selective checkpointing: docs/source/workflows/
training.md of torchao 36027d8."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return fp8doctor.plan(LLAMA_8B, "MI300X,AMD Instinct MI355X", dp=8, seq=8192, checkpointing="selective")


def test_a_bound_is_above_what_was_published_and_at_most_the_datasheets_two(plan: Plan) -> None:
    bounds = {
        each.recipe: each.speedup_high
        for each in plan.rows
        if each.gpu == "MI300X" and each.stack == "torchao"
    }
    for recipe, speedup in PUBLISHED.items():
        assert speedup < bounds[recipe] < 2
    assert bounds["rowwise_with_gw_hp"] < bounds["rowwise"]


def test_nothing_else_of_time_is_given(plan: Plan) -> None:
    for row in plan.rows:
        assert (row.step_ms, row.bf16_step_ms, row.speedup, row.speedup_low) == (None,) * 4
        assert (row.basis, row.why) in (("bound", ""), ("modelled", "it does not run there"))
    jsonschema.validate(json.loads(plan.to_json()), json.loads(PLAN.read_text("utf-8")))


def test_the_bound_is_two_if_every_flop_is_in_fp8() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, dtype=torch.bfloat16))
    row = fp8doctor.plan(model, "MI300X", batch=8, seq=2048, recipe="tensorwise").rows[0]
    assert row.speedup_high == pytest.approx(2614.9 / 1307.4)


def test_a_measured_step_cannot_scale_a_bound() -> None:
    with pytest.raises(ValueError, match="--step-ms scales estimates of the first GPU, and MI300X has none"):
        fp8doctor.plan(LLAMA_8B, "MI300X,H100", step_ms=800)
    assert fp8doctor.plan(LLAMA_8B, "H100,MI300X", step_ms=800).rows[0].bf16_step_ms == pytest.approx(800)
