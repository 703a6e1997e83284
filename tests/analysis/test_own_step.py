"""Expected FP8 GEMMs per step, and layers that Transformer Engine keeps in BF16."""

from pathlib import Path

import pytest

from fp8doctor import load_report
from fp8doctor.analysis.own_step import all_fp8, counted_gemms, due_gemms, ran_in_bf16_later
from fp8doctor.facts import Facts
from tests.recordings import name_of

TESTS = Path(__file__).parents[1]


def recording(path: str) -> Facts:
    return load_report(TESTS / path).facts


@pytest.mark.parametrize(
    ("path", "forward", "recomputed", "gradients", "counted"),
    [
        ("patients/recorded/h200-checkpointed_needlessly.json.gz", 168, 168, 336, 648),
        ("patients/recorded/h200-few_tokens.json.gz", 1792, 0, 3584, 5376),
        ("patients/recorded/h200-llama_8b_float8.json.gz", 84, 0, 168, 252),
        ("patients/recorded/h200-llama_8b_lora_r32.json.gz", 84, 0, 83, 165),
        ("patients/recorded/h200-te_fused.json.gz", 8, 0, 16, 24),
        ("running/recorded/h200-te.json.gz", 29, 0, 58, 87),
        ("running/recorded/h200-te_checkpointed.json.gz", 29, 28, 58, 31),
    ],
    ids=lambda value: name_of(Path(value)).removeprefix("h200-") if isinstance(value, str) else "",
)
def test_the_sum_of_the_layers_is_what_a_gpu_ran(
    path: str, forward: int, recomputed: int, gradients: int, counted: int
) -> None:
    facts = recording(path)
    fp8 = all_fp8(facts)
    assert due_gemms(facts, fp8) == (forward, recomputed, gradients)
    assert counted_gemms(facts) == counted
    assert ran_in_bf16_later(facts, fp8) is (counted == 31)
