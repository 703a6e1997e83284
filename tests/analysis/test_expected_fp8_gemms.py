"""Expected FP8 GEMMs per step, and layers that Transformer Engine keeps in BF16."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor import inspect_model, load_report
from fp8doctor.analysis.expected_fp8_gemms import all_fp8, counted_gemms, due_gemms, ran_in_bf16_later
from fp8doctor.facts import Facts
from tests.recordings import name_of
from tests.stand_ins import transformer_engine as te

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


def test_few_layers_among_many_are_not_seen_in_the_count() -> None:
    facts = recording("patients/recorded/h200-te_transformer.json.gz")
    assert ran_in_bf16_later(facts, all_fp8(facts)[:2]) is None


def test_a_count_with_experts_or_emulated_layers_tells_nothing() -> None:
    facts = recording("running/recorded/h200-te_checkpointed.json.gz")
    for change in ({"role": "experts"}, {"features": {"emulate": True}}, {"recipe": "custom"}):
        first, *others = facts.network.linears
        linears = (msgspec.structs.replace(first, use="training", **change), *others)
        changed = msgspec.structs.replace(
            facts, network=msgspec.structs.replace(facts.network, linears=linears)
        )
        assert ran_in_bf16_later(changed, all_fp8(facts)) is None


class Classifier(nn.Module):
    """Eight layers and a head for ten classes, which is outside of the autocast or within it."""

    def __init__(self, head_in_fp8: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*(te.Linear(32, 32) for _ in range(8)))
        self.head, self.head_in_fp8 = te.Linear(32, 10), head_in_fp8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=te.DelayedScaling()):
            x = self.body(x)
        with te.autocast(enabled=self.head_in_fp8, recipe=te.DelayedScaling()):
            return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("head_in_fp8", [True, False])
def test_only_what_runs_in_fp8_is_held_to_its_sides(
    monkeypatch: pytest.MonkeyPatch, head_in_fp8: bool
) -> None:
    te.install(monkeypatch)
    model, batch = Classifier(head_in_fp8).bfloat16(), torch.ones(16, 32, dtype=torch.bfloat16)
    model(batch)
    found = {each.code for each in inspect_model(model, batch, trial=False).findings}
    assert ("SHP001" in found) is head_in_fp8
    assert ("MOD002" in found) is not head_in_fp8
