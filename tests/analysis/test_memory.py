"""What a step holds in memory, in words, and the batch that fits for sure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.activations import kept_gib
from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.memory import USABLE, estimated_peak, largest_batch, memory_in_words
from fp8doctor.analysis.memory_fit import MAY_BE_OFF, fit, memory_row
from fp8doctor.cost.step_cost import in_bf16, with_linears_compiled
from fp8doctor.facts import Accelerate, Arm, Distributed, Facts, Workload
from fp8doctor.facts.trial import MemoryParts
from fp8doctor.render.box import answer
from tests.benchmarks.recorded_steps import JOBS, PATIENTS, reports
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED


def decoder(**parts: float) -> Facts:
    """The decoder of the recording, as if its peak had these parts."""
    facts = load_report(RECORDED / "h200-decoder_454m.json.gz").facts
    made = MemoryParts(**parts)
    peak = sum(parts.values())
    arms = tuple(
        replace(each, memory=made, peak_gib=peak) if each.name == "as_is" else each
        for each in facts.trial.arms
    )
    return replace(facts, trial=replace(facts.trial, arms=arms))


PARTS = {
    "weights_gib": 10.0,
    "fp8_copies_gib": 0.0,
    "gradients_gib": 10.0,
    "optimizer_gib": 20.0,
    "activations_gib": 30.0,
}


def test_the_parts_add_up_to_the_peak_beside_the_gpu() -> None:
    told = memory_in_words(decoder(**PARTS))
    assert told.startswith("70.0 of 140.4 GiB at the peak (weights 10.0, gradients 10.0, optimizer 20.0, ")
    assert told.endswith("activations 30.0), 28.4 in BF16; at least 41 samples fit (estimated)")


@pytest.mark.parametrize("activations", [0.2, 30.0, 90.0])
def test_the_batch_that_fits_is_a_lower_bound(activations: float) -> None:
    """Whatever grows with the batch, activations alone or all that the optimizer does not hold."""
    facts = decoder(**{**PARTS, "activations_gib": activations})
    now = arm(facts.trial, "as_is")
    assert now is not None
    most = largest_batch(now, facts)
    room = USABLE * (facts.gpus[0].memory_gib or 0.0)
    grown = 30.0 + (10.0 + activations) * (most or 16) / 16
    assert most is None or grown <= room
    assert (most is None) == (30.0 + (10.0 + activations) * 17 / 16 > room)


def arms_with_peaks() -> Iterator[tuple[str, Facts, Arm]]:
    """Every recorded arm whose peak was measured, with the facts of its form."""
    for name, facts, arms in reports((PATIENTS, JOBS)):
        plain = in_bf16(facts)
        forms = {
            "as_is": facts,
            "bf16": with_linears_compiled(plain, yes=False),
            "bf16_compiled": with_linears_compiled(plain, yes=True),
        }
        yield from (
            (name, forms[each], arms[each]) for each in forms if each in arms and arms[each].get("peak_gib")
        )


@pytest.mark.slow
def test_the_estimated_peak_beside_every_measured_one() -> None:
    """Without an estimate: attention in the open, whose scores are kept. T5's is in the open too."""
    errors, of_large, none = {}, [], set()
    for name, facts, timed in arms_with_peaks():
        peak, measured = estimated_peak(facts), timed.peak_gib or 0.0
        if peak is None or peak.activations is None:
            none.add(name)
            continue
        errors[name, timed.name] = peak.gib / measured - 1
        of_large += [abs(peak.gib / measured - 1)] if measured > 10 else []
    assert none == {"llama_eager_attention", "job gemma2_2b_eager_attention"}
    assert len(errors) >= 170
    assert median(map(abs, errors.values())) < 0.05
    assert median(of_large) < 0.04
    assert sum(error < 0.1 for error in of_large) >= 0.8 * len(of_large)
    assert max(errors.values()) <= MAY_BE_OFF
    assert min(errors.values()) >= -0.4


def test_a_model_too_large_for_the_gpu_leads_the_screen() -> None:
    said = answer(load_report(RECORDED / "h200-qwen3_moe_30b.json.gz"))
    assert said.what == "It does not fit into the GPU's memory (estimated)"
    assert said.memory == (
        "BF16 takes 227 GiB, FP8 227; the GPU has 140 (estimated). Weights, gradients and optimizer state "
        "alone take 227."
    )
    assert said.fix[0] == "Shard it over 2 GPUs or more (FSDP), or train fewer parameters (LoRA)."


def with_batch(facts: Facts, times: int) -> Facts:
    rows = {
        name: tuple(times * each for each in seen) for name, seen in facts.workload.get("rows", {}).items()
    }
    more = {
        "batch_size": times * (facts.workload.batch_size or 1),
        "tokens": times * (facts.workload.tokens or 0),
    }
    return replace(facts, workload=replace(facts.workload, rows=rows, **more))


@pytest.mark.parametrize(
    ("times", "too_large", "may_be"), [(1, False, False), (7, False, True), (20, True, True)]
)
def test_a_batch_too_large_is_told_with_one_that_fits(times: int, too_large: bool, may_be: bool) -> None:
    facts = with_batch(load_report(RECORDED / "h200-decoder_350m.json.gz").facts, times)
    found = fit(facts)
    assert found is not None
    assert (found.is_too_large, found.may_be_too_large) == (too_large, may_be)


def test_a_step_that_ran_or_is_sharded_is_not_said_to_be_too_large() -> None:
    measured = load_report(RECORDED / "h200-decoder_454m.json.gz").facts
    assert fit(measured) is None
    alone = load_report(RECORDED / "h200-qwen3_moe_30b.json.gz").facts
    spread = replace(alone, training=replace(alone.training, distributed=Distributed(world_size=8)))
    assert fit(spread) is None
    offloaded = replace(
        alone, training=replace(alone.training, accelerate=Accelerate(distributed="DEEPSPEED"))
    )
    assert fit(offloaded) is None


def test_of_skipped_layers_there_are_bounds() -> None:
    facts = load_report(RECORDED / "h200-decoder_350m.json.gz").facts
    drops = replace(facts, training=replace(facts.training, layerdrop=0.5))
    assert memory_row(facts).startswith("about 23.0 of 140.4 GiB at the peak in FP8, 28.3 in BF16 (")
    assert memory_row(drops).startswith("about 12.8 to 23.0 of 140.4 GiB at the peak in FP8")


def test_attention_in_the_open_leaves_activations_unknown() -> None:
    facts = load_report(RECORDED / "h200-llama_eager_attention.json.gz").facts
    assert kept_gib(facts) is None


def test_without_a_batch_activations_are_not_guessed() -> None:
    told = memory_row(replace(DECODER_468M, gpus=(), workload=Workload()))
    assert told == (
        "at least 3.5 GiB at the peak (weights and optimizer 2.6, gradients 0.9, activations unknown, "
        "estimated)"
    )


def test_bf16_next_to_stored_fp8_counts_bf16_weights() -> None:
    facts = load_report(RECORDED / "h200-unsloth_load_in_fp8.json.gz").facts
    in_16_bits = load_report(RECORDED / "h200-unsloth_lora.json.gz").facts
    stored, plain = fit(facts), fit(in_16_bits)
    assert stored is not None
    assert plain is not None
    assert stored.bf16.gib == pytest.approx(plain.bf16.gib, rel=1e-3)
    assert stored.now.held.weights == pytest.approx(stored.bf16.held.weights - 251658240 / 2**30)
