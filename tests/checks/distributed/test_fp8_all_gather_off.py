"""DST001 on real FSDP2 and torchao models, with the flag on and off, sharded and not."""

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.facts import Accelerate
from tests.checks import models
from tests.checks.distributed.sharded import blocks, float8, needs_a_sharded_step, processes, shard, step
from tests.checks.rules import Look, fix_of, found_by, outcome_of
from tests.stand_ins import transformer_engine

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
    finding = found_by(FLAG, facts)
    assert (finding.severity, finding.evidence["shards"]) == ("warning", 8)
    assert outcome_of(FLAG, look(shard(converted_by(finding.treatment.code)))) == "silent"
    assert "precompute_float8_dynamic_scale_for_fsdp" in finding.treatment.code
    accelerate = Accelerate(mixed_precision="fp8", prepared=True)
    facts = replace(facts, training=replace(facts.training, accelerate=accelerate))
    code = fix_of(FLAG, facts).code
    assert "AORecipeKwargs(config=config)" in code
    assert "precompute" not in code, "Accelerate computes the scales by itself"


def test_only_what_fsdp_shards_counts(eight: None, look: Look) -> None:
    model = float8(all_gather=False)
    fully_shard(model[1])
    assert found_by(FLAG, look(model)).evidence["linears"] == 2
    for other in (shard(models.float8(blocks(), "rowwise")), shard(blocks())):
        assert outcome_of(FLAG, look(other)) == "not_applicable"


def test_the_flag_without_sharding(look: Look) -> None:
    """It is information until a step was seen."""
    model = float8(all_gather=True)
    finding = found_by(FLAG, look(model))
    assert (finding.severity, finding.evidence["wrapped"]) == ("info", 4)
    assert outcome_of(FLAG, look(float8(all_gather=False))) == "not_applicable"
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    finding = found_by(FLAG, look(model, optimizer=optimizer))
    assert finding.severity == "warning"
    assert outcome_of(FLAG, look(converted_by(finding.treatment.code))) == "not_applicable"


@needs_a_sharded_step
def test_a_step_without_the_scales_and_its_treatment(eight: None, look: Look) -> None:
    model = shard(float8(all_gather=True))
    optimizer = torch.optim.AdamW(model.parameters())
    before = found_by(SCALES, look(model, optimizer=optimizer))
    assert (before.severity, before.evidence["optimizer_stepped"]) == ("info", False)
    step(model, optimizer)
    finding = found_by(SCALES, look(model, optimizer=optimizer))
    assert (finding.severity, finding.evidence["without_scale"]) == ("warning", 4)
    exec(finding.treatment.code, {"model": model})
    assert outcome_of(SCALES, look(model, optimizer=optimizer)) == "silent"


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
        assert outcome_of(SCALES, look(other)) == "not_applicable"


@pytest.mark.parametrize(("in_fp8", "outcome"), [(False, "fires"), (True, "not_applicable")])
def test_transformer_engine_gathers_what_its_layers_hold(
    eight: None, look: Look, monkeypatch: pytest.MonkeyPatch, in_fp8: bool, outcome: str
) -> None:
    te = transformer_engine.install(monkeypatch)
    model = nn.Sequential(nn.Sequential(te.Linear(64, 128), te.Linear(128, 64))).bfloat16()
    with te.autocast(enabled=True):
        model(torch.zeros(16, 64, dtype=torch.bfloat16))
    for layer in model[0]:
        layer.primary_weights_in_fp8 = in_fp8
    facts = look(shard(model))
    assert outcome_of(FLAG, facts) == outcome
    if not in_fp8:
        assert "quantized_model_init" in fix_of(FLAG, facts).code
