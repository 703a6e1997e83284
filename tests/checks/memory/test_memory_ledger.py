"""MEM005 on real models, and held to what recordings measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.memory import STATES, memory_of
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine

Look = Callable[..., Facts]
RECORDED = Path(__file__).parents[2] / "patients" / "recorded"


def mlp(kind: type[nn.Module] = nn.Linear, layers: int = 32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(kind(4096, 4096) for _ in range(layers))).bfloat16()


def told(facts: Facts) -> Finding:
    finding = finding_of("MEM005", facts)
    assert finding is not None
    return finding


def test_torchao_changes_none_of_the_large_parts(look: Look) -> None:
    finding = told(look(convert_to_float8_training(mlp()), tokens=16384))
    parameters = 32 * 4096 * 4097
    assert finding.severity == "info"
    assert finding.evidence["weights_gib"] == pytest.approx(2 * parameters / 2**30)
    assert finding.evidence["optimizer_gib"] == pytest.approx(4 * parameters / 2**30)
    assert finding.evidence["fp8_copies_gib"] == 0.0
    assert finding.evidence["linear_inputs_gib"] == 4.0
    assert finding.title.endswith(" GiB, the same in BF16 and in FP8")


def test_transformer_engine_adds_its_copies(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    te = transformer_engine.install(monkeypatch)
    finding = told(look(mlp(te.Linear), tokens=16384))
    assert finding.evidence["fp8_copies_gib"] == pytest.approx(32 * 4096 * 4096 * 2 / 2**30)
    assert finding.title.endswith(" GiB, and FP8 keeps up to 1.0 GiB more")


@pytest.mark.slow
def test_frozen_layers_have_no_gradient_and_no_state(look: Look) -> None:
    model = convert_to_float8_training(mlp(layers=256))
    for layer in model[1:]:
        layer.requires_grad_(False)
    finding = told(look(model, tokens=16384))
    assert finding.evidence["gradients_gib"] == pytest.approx(2 * 4096 * 4097 / 2**30)
    assert finding.evidence["linear_inputs_gib"] == 0.125


def test_an_optimizer_without_state(look: Look) -> None:
    model = convert_to_float8_training(mlp(layers=128))
    finding = told(look(model, tokens=64, optimizer=torch.optim.SGD(model.parameters())))
    assert finding.evidence["optimizer_gib"] == 0.0
    assert finding.treatment is None


def test_one_whose_state_is_not_known_and_a_small_or_plain_model(look: Look) -> None:
    model = convert_to_float8_training(mlp())
    rprop = look(model, tokens=64, optimizer=torch.optim.Rprop(model.parameters()))
    assert outcome_of("MEM005", rprop).outcome == "not_applicable"
    assert outcome_of("MEM005", look(mlp(), tokens=64)).outcome == "not_applicable"
    small = convert_to_float8_training(mlp(layers=2))
    assert outcome_of("MEM005", look(small, tokens=64)).outcome == "healthy"


@pytest.mark.parametrize("patient", ["te_fused", "te_transformer"])
def test_the_ledger_is_what_an_h200_measured(patient: str) -> None:
    facts, *_ = read_saved(RECORDED / f"h200-{patient}.json.gz")
    assert outcome_of("MEM005", facts).outcome == "not_applicable"
    now, bf16 = (next(arm for arm in facts.trial.arms if arm.name == name) for name in ("as_is", "bf16"))
    fp8 = [linear for linear in facts.network.linears if linear.use == "training"]
    ledger = memory_of(facts, fp8, STATES["AdamW"])
    assert now.memory is not None
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(ledger, part) == pytest.approx(getattr(now.memory, f"{part}_gib"), rel=1e-3)
    assert now.peak_gib is not None
    assert bf16.peak_gib is not None
    assert ledger.fp8_copies == pytest.approx(now.peak_gib - bf16.peak_gib, rel=0.1)


def test_inputs_of_experts_whose_rows_nobody_counted_are_not_called_none(look: Look) -> None:
    facts = look(convert_to_float8_training(mlp()), tokens=16384)
    linears = tuple(replace(each, role="experts") for each in facts.network.linears)
    finding = told(replace(facts, network=replace(facts.network, linears=linears)))
    assert finding.evidence["linear_inputs_gib"] is None
    assert "0.0 GiB" not in finding.explanation
    assert "their rows were not counted" in finding.explanation
