"""DST001 on real FSDP2 and torchao models, with the flag on and off, sharded and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.facts import Accelerate, Facts
from tests.checks.distributed.sharded import blocks, float8, processes, shard, step
from tests.checks.environment.live import facts_of, finding_of, outcome_of

Look = Callable[..., Facts]


@pytest.fixture
def eight() -> Iterator[None]:
    with processes(8):
        yield


def test_a_bf16_all_gather(eight: None, look: Look) -> None:
    facts = look(shard(float8(all_gather=False)))
    assert facts.training.distributed.world_size == 8
    assert facts.training.distributed.fsdp2_linears == ("0.0", "0.2", "1.0", "1.2")
    finding = finding_of("DST001", facts)
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "FSDP2 gathers the weights of 4 of 4 FP8 Linears in BF16"
    assert (finding.evidence["shards"], finding.evidence["first"]) == (8, "0.0")


def test_the_treatment_makes_it_silent(eight: None, look: Look) -> None:
    finding = finding_of("DST001", look(shard(float8(all_gather=False))))
    assert finding is not None
    assert finding.treatment is not None
    model = blocks()
    exec(
        finding.treatment.code,
        {
            "model": model,
            "Float8LinearConfig": Float8LinearConfig,
            "convert_to_float8_training": convert_to_float8_training,
        },
    )
    assert outcome_of("DST001", look(shard(model))).outcome == "healthy"


@pytest.mark.parametrize("by_accelerate", [True, False])
def test_accelerate_computes_the_scales_by_itself(by_accelerate: bool, eight: None, look: Look) -> None:
    facts = look(shard(float8(all_gather=False)))
    accelerate = Accelerate(mixed_precision="fp8", prepared=by_accelerate)
    training = msgspec.structs.replace(facts.training, accelerate=accelerate if by_accelerate else None)
    finding = finding_of("DST001", msgspec.structs.replace(facts, training=training))
    assert finding is not None
    assert finding.treatment is not None
    assert ("AORecipeKwargs(config=config)" in finding.treatment.code) is by_accelerate
    assert ("precompute_float8_dynamic_scale_for_fsdp" in finding.treatment.code) is not by_accelerate
    assert ("fully_shard" in finding.treatment.code) is not by_accelerate


def test_only_what_fsdp_shards_counts(eight: None, look: Look) -> None:
    model = float8(all_gather=False)
    fully_shard(model[1])
    finding = finding_of("DST001", look(model))
    assert finding is not None
    assert finding.title.startswith("FSDP2 gathers the weights of 2 of 4 FP8 Linears")


@pytest.mark.parametrize(
    ("build", "outcome"),
    [
        (lambda: shard(float8(all_gather=False, recipe="rowwise")), "not_applicable"),
        (lambda: shard(blocks()), "not_applicable"),
    ],
    ids=["rowwise cannot", "BF16"],
)
def test_where_there_is_nothing_to_set(
    build: Callable[[], nn.Module], outcome: str, eight: None, look: Look
) -> None:
    assert outcome_of("DST001", look(build())).outcome == outcome


def test_tensor_parallel_weights_are_no_fsdp(eight: None, look: Look) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = float8(all_gather=False)
    parallelize_module(
        model, init_device_mesh("cpu", (8,)), {"0.2": ColwiseParallel()}
    )  # torch 2.6 takes "0.0" for "0"
    facts = look(model)
    assert facts.training.distributed.fsdp2_linears == ()
    assert outcome_of("DST001", facts).outcome == "healthy"


def test_the_flag_before_anything_is_sharded_is_information(look: Look) -> None:
    finding = finding_of("DST001", look(float8(all_gather=True)))
    assert finding is not None
    assert finding.severity == "info"
    assert "right if fully_shard follows" in finding.explanation
    assert outcome_of("DST001", look(float8(all_gather=False))).outcome == "not_applicable"


def test_the_flag_in_a_training_that_shards_nothing(look: Look) -> None:
    model = float8(all_gather=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    finding = finding_of("DST001", look(model, optimizer=optimizer))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.treatment is not None
    fresh = blocks()
    exec(
        finding.treatment.code,
        {
            "model": fresh,
            "Float8LinearConfig": Float8LinearConfig,
            "convert_to_float8_training": convert_to_float8_training,
        },
    )
    assert outcome_of("DST001", look(fresh)).outcome == "not_applicable"


PREPARED = """
from accelerate import Accelerator
model = Accelerator(mixed_precision="fp8").prepare(model)
"""


@pytest.mark.slow
def test_accelerate_on_one_gpu() -> None:
    finding = finding_of("DST001", facts_of(PREPARED, ACCELERATE_FP8_BACKEND="AO"))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "2 FP8 Linears are wrapped for FSDP2's all-gather, but nothing is sharded"
    assert finding.treatment is not None
    name, _, value = finding.treatment.code.removeprefix("export ").partition("=")
    assert (
        outcome_of("DST001", facts_of(PREPARED, ACCELERATE_FP8_BACKEND="AO", **{name: value})).outcome
        == "not_applicable"
    )


GLOO = """
from tests.checks.distributed.sharded import float8, shard
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = shard(float8(all_gather=False))
"""


@pytest.mark.slow
def test_one_real_process_sends_nothing() -> None:
    facts = facts_of(GLOO)
    assert (facts.training.distributed.world_size, facts.training.distributed.shards) == (1, 1)
    finding = finding_of("DST001", facts)
    assert finding is not None
    assert finding.severity == "info"
