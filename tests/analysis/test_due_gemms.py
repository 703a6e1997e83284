"""The FP8 GEMMs that a step should run, against those that GPUs ran."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fp8doctor import load_report
from fp8doctor.analysis.due_gemms import all_fp8, counted_gemms, due_gemms, ran_in_bf16_later
from fp8doctor.facts import Facts

TESTS = Path(__file__).parents[1]


def recording(path: str) -> Facts:
    return load_report(TESTS / path).facts


@pytest.mark.parametrize(
    ("path", "forward", "recomputed", "gradients", "counted"),
    [
        ("patients/recorded/h200-checkpointed_needlessly.json", 168, 168, 336, 648),
        ("patients/recorded/h200-few_tokens.json", 1792, 0, 3584, 5376),
        ("patients/recorded/h200-llama_8b_float8.json", 84, 0, 168, 252),
        ("patients/recorded/h200-llama_8b_lora_r32.json", 84, 0, 83, 165),
        ("patients/recorded/h200-te_fused.json", 8, 0, 16, 24),
        ("running/recorded/h200-te.json", 29, 0, 58, 87),
        ("running/recorded/h200-te_checkpointed.json", 29, 28, 58, 31),
    ],
    ids=lambda value: Path(value).stem.removeprefix("h200-") if isinstance(value, str) else "",
)
def test_the_sum_of_the_layers_is_what_a_gpu_ran(
    path: str, forward: int, recomputed: int, gradients: int, counted: int
) -> None:
    facts = recording(path)
    fp8 = all_fp8(facts)
    assert due_gemms(facts, fp8) == (forward, recomputed, gradients)
    assert counted_gemms(facts) == counted
    assert ran_in_bf16_later(facts, fp8) is (counted == 31)


def test_few_layers_among_many_are_not_seen_in_the_count() -> None:
    facts = recording("patients/recorded/h200-te_transformer.json")
    assert ran_in_bf16_later(facts, all_fp8(facts)[:2]) is None


def test_a_count_with_experts_or_emulated_layers_tells_nothing() -> None:
    facts = recording("running/recorded/h200-te_checkpointed.json")
    for change in ({"role": "experts"}, {"features": {"emulate": True}}, {"recipe": "custom"}):
        first, *others = facts.network.linears
        linears = (msgspec.structs.replace(first, use="training", **change), *others)
        changed = msgspec.structs.replace(
            facts, network=msgspec.structs.replace(facts.network, linears=linears)
        )
        assert ran_in_bf16_later(changed, all_fp8(facts)) is None
