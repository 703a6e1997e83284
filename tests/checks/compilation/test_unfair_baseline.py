"""CMP007 on real models; the times are those of an H200, which a CPU cannot give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.checks.compilation.unfair_baseline import unfair_baseline
from fp8doctor.diagnosis.leaving_fp8 import compiled_as
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran, timed
from tests.checks.trials import tried
from tests.examine.models import Stacked, llama

Look = Callable[..., Facts]
RECORDED = Path(__file__).parents[2] / "patients" / "recorded"


@pytest.fixture
def model() -> nn.Module:
    return convert_to_float8_training(Stacked().bfloat16())


def against(facts: Facts, as_is: float, bf16: float, bf16_compiled: float) -> Any:
    arms = [
        ran(name, ms, treatments=())
        for name, ms in (("as_is", as_is), ("bf16", bf16), ("bf16_compiled", bf16_compiled))
    ]
    return unfair_baseline(timed(facts, *arms))


def test_compiled_fp8_against_eager_bf16(model: nn.Module, look: Look) -> None:
    finding = against(look(model), 88.31, 103.64, 92.72)
    assert isinstance(finding, Finding)
    assert finding.title == (
        "FP8 is 1.17x faster than BF16 without compilation, but only 1.05x faster than the best BF16"
    )
    assert finding.treatment is not None
    assert finding.treatment.code == "for block in model.blocks:\n    block.compile()"


def test_a_baseline_with_a_kv_cache_is_compiled_as_it_was_timed(look: Look) -> None:
    """With its cache every block is compiled anew, and that BF16 is slower than the one of the verdict."""
    model = convert_to_float8_training(llama().bfloat16())
    model.config.use_cache = True
    facts = look(model)
    finding = against(facts, 88.31, 103.64, 92.72)
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert "model.config.use_cache = False" in finding.treatment.code
    stay = compiled_as(ran("bf16_compiled"), timed(facts, ran("as_is")))
    assert finding.treatment.code == "\n".join(stay)
    exec(finding.treatment.code, {"model": model})
    assert model.config.use_cache is False


def test_its_ratio_is_that_of_the_times_on_the_screen(model: nn.Module, look: Look) -> None:
    """The answer beside it divides 12.3 ms by 11.8 ms; the times before they are rounded would give 1.05x."""
    finding = against(look(model), 11.75, 13.9, 12.34)
    assert isinstance(finding, Finding)
    assert finding.title.endswith("but only 1.04x faster than the best BF16")


def test_the_baseline_is_compiled_as_the_fastest_was(model: nn.Module, look: Look) -> None:
    times = {"as_is": 88.3, "bf16": 103.6, "bf16_compiled": 92.7, "bf16_as_compiled": 80.0}
    finding = unfair_baseline(timed(look(model), *(ran(name, ms) for name, ms in times.items())))
    assert isinstance(finding, Finding)
    assert finding.evidence["best_bf16_step_ms"] == 80.0
    assert finding.treatment is not None
    assert finding.treatment.code == "# compile the BF16 model as you compile this one"


def test_eager_fp8_against_eager_bf16(model: nn.Module, look: Look) -> None:
    finding = against(look(model), 366.1, 132.6, 92.7)
    assert isinstance(finding, Finding)
    assert "FP8 is 2.8x slower than BF16 without compilation, and 3.9x slower" in finding.title
    assert (
        finding.explanation
        == "Compilation alone gives BF16 1.43x: 92.7 instead of 132.6 ms/step. This FP8 is not compiled."
    )
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    finding = against(look(model), 366.1, 132.6, 92.7)
    assert isinstance(finding, Finding)
    assert "not compiled" not in finding.explanation


@pytest.mark.parametrize(
    "times",
    [(88.31, 93.5, 92.72), (179.29, 97.95, 96.82), (100.0, 90.0, 92.0)],
    ids=["alike", "slow alike", "eager is best"],
)
def test_baselines_that_agree(times: tuple[float, float, float], model: nn.Module, look: Look) -> None:
    assert against(look(model), *times) is None


def test_another_verdict(model: nn.Module, look: Look) -> None:
    """Within the limit, and yet FP8 pays against one baseline and is even with the other."""
    finding = against(look(model), 100.0, 104.0, 101.5)
    assert isinstance(finding, Finding)


@pytest.mark.slow
def test_fp32_in_disguise(look: Look) -> None:
    """The trial's own BF16 runs under autocast there; the same job without FP8 would not."""
    facts = tried(convert_to_float8_training(Stacked()), torch.zeros(2, 8, dtype=torch.long), "as_is", "bf16")
    finding = unfair_baseline(facts)
    assert isinstance(finding, Finding)
    assert (
        finding.title
        == "Without FP8 this job is not BF16: 100% of the parameters are fp32, and no autocast is on"
    )
    assert finding.evidence["baseline_under_autocast"] is True
    older = against(facts, 88.0, 93.0, 92.0)
    assert isinstance(older, Finding)
    assert older.evidence["baseline_under_autocast"] is False
    under_autocast = look(convert_to_float8_training(Stacked()), autocast=torch.bfloat16)
    assert against(under_autocast, 88.0, 93.0, 92.0) is None


def test_what_a_cpu_takes_is_no_baseline(model: nn.Module, look: Look) -> None:
    arms = ran("as_is", 100.0), ran("bf16", 120.0), ran("bf16_compiled", 90.0)
    assert isinstance(unfair_baseline(timed(look(model), *arms, device="cpu")), NotApplicable)


def test_without_fp8_there_is_no_comparison(look: Look) -> None:
    assert isinstance(against(look(Stacked().bfloat16()), 100.0, 120.0, 90.0), NotApplicable)
    assert isinstance(unfair_baseline(timed(look(Stacked().bfloat16()), ran("as_is"))), NotApplicable)


def test_recorded_on_an_h200() -> None:
    facts = load_report(RECORDED / "h200-decoder_468m_compiled.json.gz").facts
    finding = unfair_baseline(facts)
    assert isinstance(finding, Finding)
    assert finding.evidence["speedup_over_eager_bf16"] > finding.evidence["speedup_over_best_bf16"] + 0.05
