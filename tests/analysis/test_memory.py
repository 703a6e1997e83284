"""What a step holds in memory, in words, and the batch that fits for sure."""

from collections.abc import Callable, Iterator
from statistics import median

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8doctor import load_report
from fp8doctor.analysis.activations import dequantized_gib
from fp8doctor.analysis.memory import estimated_peak, fit, stored_weights_fit_in_bf16
from fp8doctor.cost.step_cost import in_bf16, with_linears_compiled
from fp8doctor.facts import Accelerate, Arm, Distributed, Facts
from research.benchmarks.recorded_steps import JOBS, PATIENTS, reports
from tests import replays
from tests.examine.models import StoredLinear, low_rank
from tests.test_recorded import RECORDED


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
    errors, of_large, none, too_much = {}, [], set(), {}
    for name, facts, timed in arms_with_peaks():
        peak, measured = estimated_peak(facts), timed.peak_gib or 0.0
        if peak is None or peak.activations is None:
            none.add(name)
            continue
        errors[name, timed.name] = peak.gib / measured - 1
        too_much[name, timed.name] = peak.least_gib / measured - 1
        of_large += [abs(peak.gib / measured - 1)] if measured > 10 else []
    assert none == {"llama_eager_attention", "job gemma2_2b_eager_attention"}
    assert len(errors) >= 170
    assert median(map(abs, errors.values())) < 0.05
    assert median(of_large) < 0.04
    assert sum(error < 0.1 for error in of_large) >= 0.8 * len(of_large)
    assert max(errors.values()) <= 0.65
    assert max(too_much.values()) <= 0
    assert min(errors.values()) >= -0.4


def test_what_convolutions_keep_is_not_known() -> None:
    peak = estimated_peak(replays.of("benchmarks", "h100-unet").report.facts)
    assert peak
    assert peak.activations is None


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
    assert fit(facts) is found
    assert (found.is_too_large, found.may_be_too_large) == (too_large, may_be)


def test_gradients_of_one_micro_batch_are_there_beside_the_next() -> None:
    facts = load_report(RECORDED / "h200-decoder_350m.json.gz").facts
    once = estimated_peak(facts)
    assert once
    assert once.activations
    times = once._replace(accumulates=True)
    assert estimated_peak(replace(facts, workload=replace(facts.workload, accumulate=4))) == times
    assert times.gib == pytest.approx(once.fixed + once.gradients + once.activations)
    assert times.samples(30.0, 64) < once.samples(30.0, 64)  # type: ignore[operator]


def test_states_in_8_bits_and_a_frozen_model() -> None:
    facts = load_report(RECORDED / "h200-decoder_350m.json.gz").facts
    small = replace(facts, training=replace(facts.training, optimizer="torchao.optim.adam.AdamW8bit"))
    frozen = replace(facts, network=replace(facts.network, trainable_parameters=0))
    of_small, of_frozen = estimated_peak(small), estimated_peak(frozen)
    assert of_small is not None
    assert of_frozen is not None
    assert of_small.optimizer * 2**30 == 2 * facts.network.trainable_parameters
    assert of_frozen.activations is None


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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_autograd_keeps_a_dequantized_copy_of_each_stored_weight(
    checkpointed: bool, look: Callable[..., Facts]
) -> None:
    blocks = [low_rank(StoredLinear(64, 64), "lora_down", "lora_up") for _ in range(8)]
    batch, copies = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True), set[int]()
    model = nn.Sequential(*(checkpoint_wrapper(each) if checkpointed else each for each in blocks))

    def pack(kept: Tensor) -> Tensor:
        if kept.shape == (64, 64) and kept.dtype is torch.bfloat16:
            copies.add(kept.data_ptr())
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept):
        model(batch)
    assert len(copies) == (0 if checkpointed else 8)
    most = 1 if checkpointed else 8  # the backward makes those of one block again
    facts = look(model, tokens=16, batch=(batch,))
    assert dequantized_gib(facts) * 2**30 == most * 64 * 64 * 2


def test_stored_weights_are_loaded_in_bf16_if_the_peak_that_was_seen_leaves_room() -> None:
    facts = replays.of("running", "h200-unsloth_load_in_fp8").report.facts
    full = replace(facts, observed=replace(facts.observed, peak_gib=133.3))
    assert [stored_weights_fit_in_bf16(each) for each in (facts, full)] == [True, False]
