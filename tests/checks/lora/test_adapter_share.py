"""LORA001 on real PEFT models: shares from examine, time from the arm that switches the adapters off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.lora.adapter_share import adapter_share
from fp8doctor.facts import Arm, Facts
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import failed, ran, timed
from tests.checks.trials import tried

Look = Callable[..., Facts]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def lora() -> nn.Module:
    return get_peft_model(
        convert_to_float8_training(Decoder().bfloat16()), LoraConfig(r=16, target_modules=["up", "down"])
    )


def test_time_counts_and_not_flops(lora: nn.Module, look: Look) -> None:
    facts = timed(
        look(lora, tokens=4096),
        ran("as_is", 120.0),
        ran("bf16_compiled", 150.0),
        ran("without_adapters", 90.0, base="as_is"),
    )
    finding = adapter_share(facts)
    assert isinstance(finding, Finding)
    parameters = 2 * 16 * (256 + 1024)
    assert finding.evidence["adapter_parameters"] == parameters
    assert finding.evidence["flops_share_pct"] == pytest.approx(
        100 * 6 * parameters / (6 * parameters + (2 + 4) * 256 * 1024)
    )
    assert finding.evidence["time_share_pct"] == pytest.approx(25.0)
    assert finding.evidence["adapters_ms"] == pytest.approx(30.0)
    assert finding.evidence["fp8_ceiling"] == pytest.approx(150 / (30 + 120 / 2), rel=1e-3)
    assert finding.evidence["adapter_dtypes"] == ("float32",)
    assert finding.title == "LoRA takes 30.0 of 120.0 ms/step, with 14% of the matmul FLOPs"
    assert finding.treatment is not None
    assert finding.saving_ms is None


def test_the_base_of_the_arm_is_what_it_is_compared_with(lora: nn.Module, look: Look) -> None:
    facts = timed(
        look(lora, tokens=4096),
        ran("as_is", 400.0),
        ran("prescribed", 100.0, base="as_is"),
        ran("without_adapters", 98.0, base="prescribed"),
    )
    finding = adapter_share(facts)
    assert isinstance(finding, Finding)
    assert (finding.evidence["of_arm"], finding.evidence["adapters_ms"]) == ("prescribed", pytest.approx(2.0))
    assert finding.evidence["fp8_ceiling"] is None
    assert finding.treatment is None, "2% are not worth a change"


def test_no_time_is_claimed_within_the_spread(lora: nn.Module, look: Look) -> None:
    finding = adapter_share(
        timed(
            look(lora, tokens=4096),
            ran("as_is", 100.0),
            ran("without_adapters", 99.0, spread_ms=3.0, base="as_is"),
        )
    )
    assert isinstance(finding, Finding)
    assert finding.title.startswith("LoRA takes no time beyond the timing noise")
    assert finding.treatment is None


@pytest.mark.parametrize(
    ("arms", "reason"),
    [
        ((ran("as_is"),), "it timed no step without them"),
        (
            (ran("as_is"), failed("without_adapters", "it did not fit into the budget of 60 s")),
            "it did not fit into the budget of 60 s",
        ),
        (
            (failed("as_is", "it raises"), ran("without_adapters", base="as_is")),
            "it timed no step without them",
        ),
    ],
)
def test_without_the_arm_no_time_is_said(
    lora: nn.Module, look: Look, arms: tuple[Arm, ...], reason: str
) -> None:
    finding = adapter_share(timed(look(lora, tokens=4096), *arms))
    assert isinstance(finding, Finding)
    assert finding.explanation == f"The trial did not measure what the adapters cost in time: {reason}."
    assert "time_share_pct" not in finding.evidence
    assert finding.treatment is None


def test_without_adapters_there_is_no_question(lora: nn.Module, look: Look) -> None:
    arms = ran("as_is", 120.0), ran("without_adapters", 90.0, base="as_is")
    assert isinstance(adapter_share(timed(look(lora.unload(), tokens=4096), *arms)), NotApplicable)


@pytest.mark.slow
def test_a_real_step_without_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    base = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64))
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["1", "2"]))
    facts = tried(
        model, torch.randint(0, 64, (4, 16)), "as_is", more=lambda of, as_is: of.adapters_left_out(as_is)
    )
    finding = adapter_share(facts)
    assert isinstance(finding, Finding)
    assert finding.explanation.endswith("the trial ran on a CPU, which says nothing about a GPU.")
    assert finding.treatment is None
    finding = adapter_share(timed(facts, *facts.trial.arms))
    assert isinstance(finding, Finding)
    times = {arm.name: arm.step_ms for arm in facts.trial.arms}
    assert finding.evidence["of_arm"] == "as_is"
    assert f"takes {times['without_adapters']:.1f} instead of {times['as_is']:.1f} ms" in finding.explanation
    assert finding.evidence["measured_on"] == "NVIDIA H200"


def test_no_ceiling_where_bf16_with_such_adapters_was_not_timed(lora: nn.Module, look: Look) -> None:
    """The prescription casts the adapters to BF16, which no BF16 arm does."""
    prescribed = ran("prescribed", 100.0, base="as_is", treatments=("compile-blocks", "adapters-to-bf16"))
    finding = adapter_share(
        timed(
            look(lora, tokens=4096),
            ran("as_is", 400.0),
            ran("bf16_compiled", 150.0),
            prescribed,
            ran("without_adapters", 80.0, base="prescribed"),
        )
    )
    assert isinstance(finding, Finding)
    assert finding.evidence["time_share_pct"] == pytest.approx(20.0)
    assert finding.evidence["fp8_ceiling"] is None
    assert "x BF16" not in finding.explanation
