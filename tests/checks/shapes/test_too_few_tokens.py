"""SHP003 on a real converted model with batches of every size, given and synthetic."""

from functools import cache

import pytest
from msgspec.structs import replace
from torch import nn

from fp8doctor.facts import Facts, Workload
from fp8doctor.gpus import GPUS
from tests.checks.arms import ran, timed
from tests.checks.models import float8, llama_1b
from tests.checks.rules import Look, fix_of, found_by, outcome_of

FEW = "too-few-tokens"


@cache
def llama() -> nn.Module:
    return float8(llama_1b(), keep=("lm_head",))


def with_batch(facts: Facts, batch: int, sequence: int, accumulate: int = 1, source: str = "given") -> Facts:
    sizes = {"batch_size": batch, "sequence_length": sequence, "tokens": batch * sequence}
    workload = Workload(batch_source=source, accumulate=accumulate, **sizes)  # type: ignore[arg-type]
    return replace(facts, workload=workload)


def test_the_printed_batch_makes_it_silent(look: Look) -> None:
    facts = look(llama())
    finding = found_by(FEW, with_batch(facts, 1, 256, accumulate=32))
    assert (finding.severity, finding.evidence["crossing_tokens"]) == ("warning", 4096)
    scope: dict[str, int] = {}
    exec(finding.treatment.code, scope)
    assert (scope["batch_size"], scope["accumulate"]) == (16, 2), "the same samples for each optimizer step"
    assert outcome_of(FEW, with_batch(facts, scope["batch_size"], 256, scope["accumulate"])) == "silent"


@pytest.mark.parametrize(("accumulate", "name"), [(1, "stay-in-bf16"), (128, "more-tokens")])
def test_no_batch_has_to_grow_a_hundredfold(accumulate: int, name: str, look: Look) -> None:
    """A step of 128 micro-batches has the samples; one of a single micro-batch is another training then."""
    assert fix_of(FEW, with_batch(look(llama()), 1, 32, accumulate)).name == name


@pytest.mark.parametrize("gpu", [spec.name for spec in GPUS if spec.fp8_tflops])
def test_on_every_gpu_few_tokens_are_too_few_and_many_are_not(gpu: str, look: Look) -> None:
    facts = replace(look(llama()), assumed_gpu=gpu)
    assert outcome_of(FEW, with_batch(facts, 1, 64)) == "fires"
    assert outcome_of(FEW, with_batch(facts, 16, 2048)) == "silent"


def test_only_a_batch_of_the_users_on_a_gpu_with_fp8_is_judged(look: Look) -> None:
    facts = look(llama())
    assert outcome_of(FEW, with_batch(facts, 4, 256)) == "fires"
    assert outcome_of(FEW, with_batch(facts, 1, 256, source="made up")) == "not_applicable"
    assert outcome_of(FEW, with_batch(replace(facts, assumed_gpu="A100"), 1, 256)) == "not_applicable"


@pytest.mark.parametrize(
    ("prescribed_ms", "device", "outcome"),
    [(102.0, "cuda", "silent"), (110.0, "cuda", "fires"), (92.0, "cpu", "fires")],
    ids=["even", "slower", "on a CPU"],
)
def test_a_whole_step_that_is_not_slower_shows_that_the_tokens_suffice(
    prescribed_ms: float, device: str, outcome: str, look: Look
) -> None:
    fixed = ran("prescribed", prescribed_ms, base="as_is", treatments=("compile-blocks",))
    arms = (ran("as_is", 300.0), ran("bf16_compiled", 100.0), fixed)
    assert outcome_of(FEW, timed(with_batch(look(llama()), 1, 256), *arms, device=device)) == outcome
