"""DST001 on real FSDP2 and torchao models, with the flag on and off, sharded and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

from fp8doctor.facts import Accelerate, Facts
from tests.checks.distributed.sharded import blocks, float8, needs_a_sharded_step, processes, shard, step
from tests.checks.environment.live import facts_of, finding_of, outcome_of

Look = Callable[..., Facts]
FLAG, SCALES = "fp8-all-gather-off", "scale-precompute-missing"


@pytest.fixture
def eight() -> Iterator[None]:
    with processes(8):
        yield


def converted_by(code: str) -> nn.Sequential:
    """The blocks after the printed lines."""
    names = {"Float8LinearConfig": Float8LinearConfig, "model": blocks()}
    exec(code, names | {"convert_to_float8_training": convert_to_float8_training})
    return names["model"]  # type: ignore[return-value]


def test_a_bf16_all_gather_and_its_treatment(eight: None, look: Look) -> None:
    facts = look(shard(float8(all_gather=False)))
    assert facts.training.distributed.fsdp2_linears == ("0.0", "0.2", "1.0", "1.2")
    finding = finding_of(FLAG, facts)
    assert (finding.severity, finding.evidence["shards"]) == ("warning", 8)
    assert outcome_of(FLAG, look(shard(converted_by(finding.treatment.code)))).outcome == "silent"
    assert "precompute_float8_dynamic_scale_for_fsdp" in finding.treatment.code
    accelerate = Accelerate(mixed_precision="fp8", prepared=True)
    facts = replace(facts, training=replace(facts.training, accelerate=accelerate))
    code = finding_of(FLAG, facts).treatment.code
    assert "AORecipeKwargs(config=config)" in code
    assert "precompute" not in code, "Accelerate computes the scales by itself"


def test_only_what_fsdp_shards_counts(eight: None, look: Look) -> None:
    model = float8(all_gather=False)
    fully_shard(model[1])
    assert finding_of(FLAG, look(model)).evidence["linears"] == 2
    for other in (shard(float8(all_gather=False, recipe="rowwise")), shard(blocks())):
        assert outcome_of(FLAG, look(other)).outcome == "not_applicable"


def test_the_flag_without_sharding(look: Look) -> None:
    """It is information until a step was seen."""
    model = float8(all_gather=True)
    finding = finding_of(FLAG, look(model))
    assert (finding.severity, finding.evidence["wrapped"]) == ("info", 4)
    assert outcome_of(FLAG, look(float8(all_gather=False))).outcome == "not_applicable"
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    finding = finding_of(FLAG, look(model, optimizer=optimizer))
    assert finding.severity == "warning"
    assert outcome_of(FLAG, look(converted_by(finding.treatment.code))).outcome == "not_applicable"


PREPARED = """
from accelerate import Accelerator
model = Accelerator(mixed_precision="fp8").prepare(model)
"""

GLOO = """
from tests.checks.distributed.sharded import float8, shard
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = shard(float8(all_gather=False))
"""


@pytest.mark.slow
def test_accelerate_on_one_gpu_and_one_real_process() -> None:
    finding = finding_of(FLAG, facts_of(PREPARED, ACCELERATE_FP8_BACKEND="AO"))
    assert (finding.severity, finding.evidence["wrapped"]) == ("warning", 2)
    name, _, value = finding.treatment.code.removeprefix("export ").partition("=")
    facts = facts_of(PREPARED, ACCELERATE_FP8_BACKEND="AO", **{name: value})
    assert outcome_of(FLAG, facts).outcome == "not_applicable"
    facts = facts_of(GLOO)
    assert (facts.training.distributed.world_size, facts.training.distributed.shards) == (1, 1)
    assert finding_of(FLAG, facts).severity == "info", "one process sends nothing"


@needs_a_sharded_step
@pytest.mark.parametrize("count", [1, 8])
def test_a_step_without_the_scales_and_its_treatment(count: int, look: Look) -> None:
    with processes(count):
        model = shard(float8(all_gather=True))
        optimizer = torch.optim.AdamW(model.parameters())
        before = finding_of(SCALES, look(model, optimizer=optimizer))
        assert (before.severity, before.evidence["optimizer_stepped"]) == ("info", False)
        step(model, optimizer)
        finding = finding_of(SCALES, look(model, optimizer=optimizer))
        assert (finding.severity, finding.evidence["without_scale"]) == ("warning", 4)
        exec(finding.treatment.code, {"model": model})
        assert outcome_of(SCALES, look(model, optimizer=optimizer)).outcome == "silent"
        step(model, optimizer)
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert outcome_of(SCALES, look(model, optimizer=optimizer)).outcome == "silent"


def test_looking_asks_for_no_collective_and_changes_no_scale(
    eight: None, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shard(float8(all_gather=True))
    called: list[str] = []
    for name in ("all_reduce", "all_gather_into_tensor", "barrier"):
        monkeypatch.setattr(torch.distributed, name, lambda *args, name=name, **kwargs: called.append(name))
    look(model)
    assert called == []
    assert model[0][0].weight._local_tensor._precomputed_scale is None
    for other in (shard(float8(all_gather=False)), shard(blocks()), float8(all_gather=True)):
        assert outcome_of(SCALES, look(other)).outcome == "not_applicable"
