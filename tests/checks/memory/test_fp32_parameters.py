"""MEM003 on real models: fp32 weights that FP8 layers, Accelerate or a measured step make a disease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, Trial
from tests.checks.distributed.sharded import processes
from tests.checks.environment.live import facts_of, finding_of, outcome_of

Look = Callable[..., Facts]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)).to(dtype)


def test_a_conversion_in_fp32(look: Look) -> None:
    finding = finding_of("MEM003", look(convert_to_float8_training(mlp())))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "2 of 2 Linears are fp32, and no autocast is on"
    assert finding.explanation.startswith("The model has 2 FP8 layers, but 100% of the weights are fp32")
    assert finding.treatment is not None
    assert finding.treatment.name == "autocast-bf16"


def test_an_fp32_head_is_counted_with_the_body(look: Look) -> None:
    body = convert_to_float8_training(mlp())
    finding = finding_of("MEM003", look(nn.Sequential(body, nn.LayerNorm(64), nn.Linear(64, 1000))))
    assert finding is not None
    assert finding.title.startswith("3 of 3 Linears are fp32")
    assert "100% of the weights are fp32" in finding.explanation


def test_the_treatment_makes_it_silent(look: Look) -> None:
    model = convert_to_float8_training(mlp())
    finding = finding_of("MEM003", look(model))
    assert finding is not None
    assert finding.treatment is not None
    assert model(torch.zeros(16, 64)).dtype is torch.float32
    exec(finding.treatment.code, {"model": model, "torch": torch})
    facts = look(model)
    assert facts.training.autocast == "bfloat16"
    assert outcome_of("MEM003", facts).outcome == "healthy"
    model[2].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    seen: list[torch.dtype] = []
    model(torch.zeros(16, 64)).sum().backward()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (lambda: convert_to_float8_training(mlp(torch.bfloat16)), {}),
        (lambda: convert_to_float8_training(mlp()), {"autocast": torch.bfloat16}),
        (lambda: nn.Sequential(convert_to_float8_training(mlp(torch.bfloat16)), nn.Linear(16, 16)), {}),
    ],
    ids=["BF16 weights", "autocast", "a small fp32 part"],
)
def test_healthy_fp8(model: Callable[[], nn.Module], fields: dict[str, Any], look: Look) -> None:
    assert outcome_of("MEM003", look(model(), **fields)).outcome == "healthy"


@pytest.mark.parametrize(("dtype", "outcome"), [(torch.bfloat16, "healthy"), (torch.float32, "unknown")])
def test_an_autocast_that_nobody_saw_is_asked_about_where_it_matters(
    dtype: torch.dtype, outcome: str, look: Look
) -> None:
    facts = look(convert_to_float8_training(mlp(dtype)))
    unseen = msgspec.structs.replace(facts.training, autocast=NOT_RECORDED)
    assert outcome_of("MEM003", msgspec.structs.replace(facts, training=unseen)).outcome == outcome


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = convert_to_float8_training(mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.body(x)


def step_inside(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        return model(batch).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [(Inside, {}), (lambda: convert_to_float8_training(mlp()), {"training_step": step_inside})],
    ids=["in the forward", "in the training step"],
)
def test_an_autocast_inside_is_seen_in_a_forward(
    model: Callable[[], nn.Module], fields: dict[str, Any], look: Look
) -> None:
    batch = torch.ones(16, 64)
    assert outcome_of("MEM003", look(model(), batch=batch, **fields)).outcome == "healthy"
    assert outcome_of("MEM003", look(model(), **fields)).outcome == "unknown"


def test_fp32_router_and_head_are_left_alone(look: Look) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(512, 64), mlp(), nn.Linear(64, 512)

    model = convert_to_float8_training(
        Decoder().bfloat16(), module_filter_fn=lambda module, name: name != "head"
    )
    model.head.float()
    assert outcome_of("MEM003", look(model)).outcome == "healthy"


def test_an_untouched_fp32_model_is_not_sick(look: Look) -> None:
    assert outcome_of("MEM003", look(mlp())).outcome == "not_applicable"


def measured(facts: Facts, device: str) -> Facts:
    """The facts with a trial beside them, as a trial on that device leaves it."""
    return msgspec.structs.replace(
        facts,
        trial=Trial(
            device=device, arms=(Arm(name="as_is", tried=True, reason=None, step_ms=10.0),), reliable=True
        ),
    )


@pytest.mark.parametrize(("device", "outcome"), [("cuda", "sick"), ("cpu", "not_applicable")])
def test_a_measured_step_in_fp32(device: str, outcome: str, look: Look) -> None:
    assert outcome_of("MEM003", measured(look(mlp()), device)).outcome == outcome
    assert outcome_of("MEM003", measured(look(mlp(torch.bfloat16)), device)).outcome in (
        "healthy",
        "not_applicable",
    )


@pytest.mark.parametrize("kept", [True, False], ids=["its Accelerator is alive", "its Accelerator is gone"])
@pytest.mark.usefixtures("forget_accelerate")
def test_an_accelerator_of_another_model_says_nothing_of_this_one(kept: bool, look: Look) -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    accelerator.prepare(mlp())
    if not kept:
        del accelerator
    model = convert_to_float8_training(mlp())
    assert outcome_of("MEM003", look(model)).outcome == "sick"
    assert outcome_of("MEM003", look(model, autocast=torch.bfloat16)).outcome == "healthy"


@pytest.mark.usefixtures("forget_accelerate")
def test_fp8_that_another_model_was_prepared_for_was_not_asked_of_this_one(look: Look) -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    assert fp8_was_asked_for(look(mlp())) == "Accelerator(mixed_precision='fp8')"
    accelerator.prepare(mlp())
    assert fp8_was_asked_for(look(mlp())) is None


PREPARED = """
from accelerate import Accelerator
model = Accelerator(mixed_precision="bf16").prepare(model)
"""

ANNOUNCED = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
"""


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (PREPARED, "healthy"),
        (PREPARED + "model.forward = model._original_forward", "sick"),
        (ANNOUNCED, "not_applicable"),
        (
            ANNOUNCED
            + "from torchao.float8 import convert_to_float8_training\nconvert_to_float8_training(model)",
            "not_applicable",
        ),
    ],
    ids=["prepared", "its autocast taken off", "not prepared yet", "converted and not prepared yet"],
)
def test_what_accelerate_prepared(program: str, outcome: str) -> None:
    assert outcome_of("MEM003", facts_of(program)).outcome == outcome


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32, None], ids=str)
def test_what_fsdp2_gathers_in_bf16_is_not_computed_in_fp32(
    look: Look, param_dtype: torch.dtype | None
) -> None:
    with processes(1):
        model = convert_to_float8_training(mlp())
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
        finding = finding_of("MEM003", look(model))
    assert (finding is None) == (param_dtype is torch.bfloat16)
