"""SHP003 on a real converted model with batches of every size, given and made up."""

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
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]


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
    tokens = batch * sequence
    made = Workload(
        batch_source=source, batch_size=batch, sequence_length=sequence, tokens=tokens, accumulate=accumulate
    )  # type: ignore[arg-type]
    return msgspec.structs.replace(facts, workload=made)


def test_one_short_sequence_is_too_little(look: Look) -> None:
    finding = finding_of("SHP003", with_batch(look(llama()), 1, 256, accumulate=32))
    assert finding is not None
    assert finding.severity == "warning"
    assert (
        finding.title
        == "256 tokens per micro-batch are too few for the FP8 layers; they gain from about 4,096"
    )
    assert finding.evidence["crossing_tokens"] == 4096
    assert "(estimated, H100)" in finding.explanation
    assert finding.treatment is not None
    assert (
        finding.treatment.code
        == "batch_size = 16   # from 1, or longer sequences: 4,096 tokens\naccumulate = 2   # from 32"
    )
    assert finding.treatment.summary == "use 4,096 tokens per micro-batch"


@pytest.mark.parametrize(
    ("sequence", "accumulate", "where", "batch"),
    [
        (256, 1, "per step", "grows to 16"),
        (256, 4, "per micro-batch", "grows to 4"),
        (256, 24, "per micro-batch", "shrinks to 0.67"),
    ],
)
def test_a_global_batch_that_does_not_stay_is_told(
    sequence: int, accumulate: int, where: str, batch: str, look: Look
) -> None:
    finding = finding_of("SHP003", with_batch(look(llama()), 1, sequence, accumulate))
    assert finding is not None
    assert finding.title.startswith(f"{sequence} tokens {where} are too few")
    assert finding.treatment is not None
    assert (
        finding.treatment.summary
        == f"use 4,096 tokens per micro-batch; the global batch {batch} times its size, which changes "
        "the training"
    )


@pytest.mark.parametrize(("accumulate", "treatment"), [(1, "stay-in-bf16"), (128, "more-tokens")])
def test_no_batch_is_told_to_grow_a_hundredfold(accumulate: int, treatment: str, look: Look) -> None:
    """A step of 128 micro-batches has the samples; one of a single micro-batch is another training then."""
    finding = finding_of("SHP003", with_batch(look(llama()), 1, 32, accumulate))
    assert finding is not None
    assert finding.evidence["crossing_tokens"] == 4096
    assert finding.treatment is not None
    assert finding.treatment.name == treatment


def test_the_printed_batch_makes_it_silent(look: Look) -> None:
    facts = look(llama())
    finding = finding_of("SHP003", with_batch(facts, 1, 256, accumulate=32))
    assert finding is not None
    assert finding.treatment is not None
    scope: dict[str, int] = {}
    exec(finding.treatment.code, scope)
    assert scope["batch_size"] * scope["accumulate"] == 32, "the same samples for each step of the optimizer"
    assert (
        outcome_of("SHP003", with_batch(facts, scope["batch_size"], 256, scope["accumulate"])).outcome
        == "healthy"
    )


@pytest.mark.parametrize("gpu", [spec.name for spec in GPUS if spec.fp8_tflops])
def test_on_every_gpu_few_tokens_are_too_few_and_many_are_not(gpu: str, look: Look) -> None:
    facts = msgspec.structs.replace(look(llama()), assumed_gpu=gpu)
    assert outcome_of("SHP003", with_batch(facts, 1, 64)).outcome == "sick"
    assert outcome_of("SHP003", with_batch(facts, 16, 2048)).outcome == "healthy"


@pytest.mark.parametrize(
    ("batch", "source", "outcome"),
    [
        (1, "made up", "not_applicable"),
        (1, None, "not_applicable"),
        (4, "given", "sick"),
        (32, "given", "healthy"),
    ],
)
def test_only_a_batch_of_the_users_is_judged(batch: int, source: str, outcome: str, look: Look) -> None:
    assert outcome_of("SHP003", with_batch(look(llama()), batch, 256, source=source)).outcome == outcome


def test_layers_that_no_number_of_tokens_helps_are_too_small_instead(look: Look) -> None:
    facts = with_batch(look(llama(256)), 1, 256)
    assert outcome_of("SHP003", facts).outcome == "healthy"
    assert outcome_of("SHP002", facts).outcome == "sick"


@pytest.mark.parametrize(
    ("prescribed_ms", "device", "outcome"),
    [(92.0, "cuda", "healthy"), (102.0, "cuda", "healthy"), (110.0, "cuda", "sick"), (92.0, "cpu", "sick")],
    ids=["faster", "even", "slower", "on a CPU"],
)
def test_a_whole_step_that_is_not_slower_shows_that_the_tokens_suffice(
    prescribed_ms: float, device: str, outcome: str, look: Look
) -> None:
    arms = (
        ran("as_is", 300.0),
        ran("bf16_compiled", 100.0),
        ran("prescribed", prescribed_ms, base="as_is", treatments=("compile-blocks",)),
    )
    facts = with_batch(look(llama()), 1, 256)
    assert outcome_of("SHP003", facts).outcome == "sick"
    facts = msgspec.structs.replace(
        facts, trial=Trial(device=device, gpu=None, arms=arms, reliable=True, reason=None)
    )
    assert outcome_of("SHP003", facts).outcome == outcome


def test_a_gpu_without_fp8_is_another_matter(look: Look) -> None:
    facts = msgspec.structs.replace(look(llama()), assumed_gpu="A100")
    assert outcome_of("SHP003", with_batch(facts, 1, 256)).outcome == "not_applicable"
