"""SHP003 on a real converted model with batches of every size, given and synthetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.cost import GPUS
from fp8doctor.facts import Facts, Trial, Workload
from tests.checks.arms import ran
from tests.checks.rules import found_by, outcome_of

Look = Callable[..., Facts]
FEW = "too-few-tokens"


@cache
def llama(width: int = 2048) -> nn.Module:
    """Llama 1B's shapes."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        vocab_size=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    return convert_to_float8_training(model, module_filter_fn=lambda layer, name: "head" not in name)


def with_batch(facts: Facts, batch: int, sequence: int, accumulate: int = 1, source: str = "given") -> Facts:
    sizes = {"batch_size": batch, "sequence_length": sequence, "tokens": batch * sequence}
    workload = Workload(batch_source=source, accumulate=accumulate, **sizes)  # type: ignore[arg-type]
    return msgspec.structs.replace(facts, workload=workload)


def test_the_printed_batch_makes_it_silent(look: Look) -> None:
    facts = look(llama())
    finding = found_by(FEW, with_batch(facts, 1, 256, accumulate=32))
    assert (finding.severity, finding.evidence["crossing_tokens"]) == ("warning", 4096)
    scope: dict[str, int] = {}
    exec(finding.treatment.code, scope)
    assert (scope["batch_size"], scope["accumulate"]) == (16, 2), "the same samples for each optimizer step"
    assert outcome_of(FEW, with_batch(facts, scope["batch_size"], 256, scope["accumulate"])) == "silent"


def test_no_batch_has_to_grow_a_hundredfold(look: Look) -> None:
    """A step of 128 micro-batches has the samples; one of a single micro-batch is another training then."""
    for accumulate, name in ((1, "stay-in-bf16"), (128, "more-tokens")):
        treatment = found_by(FEW, with_batch(look(llama()), 1, 32, accumulate)).treatment
        assert treatment.name == name


@pytest.mark.parametrize("gpu", [spec.name for spec in GPUS if spec.fp8_tflops])
def test_on_every_gpu_few_tokens_are_too_few_and_many_are_not(gpu: str, look: Look) -> None:
    facts = msgspec.structs.replace(look(llama()), assumed_gpu=gpu)
    assert outcome_of(FEW, with_batch(facts, 1, 64)) == "fires"
    assert outcome_of(FEW, with_batch(facts, 16, 2048)) == "silent"


def test_only_a_batch_of_the_users_on_a_gpu_with_fp8_is_judged(look: Look) -> None:
    facts = look(llama())
    assert outcome_of(FEW, with_batch(facts, 4, 256)) == "fires"
    assert outcome_of(FEW, with_batch(facts, 1, 256, source="made up")) == "not_applicable"
    ampere = msgspec.structs.replace(facts, assumed_gpu="A100")
    assert outcome_of(FEW, with_batch(ampere, 1, 256)) == "not_applicable"


@pytest.mark.parametrize(
    ("prescribed_ms", "device", "outcome"),
    [(92.0, "cuda", "silent"), (102.0, "cuda", "silent"), (110.0, "cuda", "fires"), (92.0, "cpu", "fires")],
    ids=["faster", "even", "slower", "on a CPU"],
)
def test_a_whole_step_that_is_not_slower_shows_that_the_tokens_suffice(
    prescribed_ms: float, device: str, outcome: str, look: Look
) -> None:
    fixed = ran("prescribed", prescribed_ms, base="as_is", treatments=("compile-blocks",))
    arms = (ran("as_is", 300.0), ran("bf16_compiled", 100.0), fixed)
    trial = Trial(device=device, gpu=None, arms=arms, reliable=True, reason=None)
    facts = msgspec.structs.replace(with_batch(look(llama()), 1, 256), trial=trial)
    assert outcome_of(FEW, facts) == outcome
