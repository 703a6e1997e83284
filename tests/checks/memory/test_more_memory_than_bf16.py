"""MEM001 on real torchao, PEFT and (stand-in) TE models, with peaks as they were measured on an H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.analysis.memory import STATES, memory_of
from fp8doctor.checks.memory.more_memory_than_bf16 import more_memory_than_bf16
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Arm, Facts, Gpu, MemoryParts
from fp8doctor.finding import Finding
from tests.checks.arms import ran, timed
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]
LEDGER = "memory-ledger"


def in_fp8() -> nn.Module:
    return convert_to_float8_training(
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    )


def peaks(as_is: float, bf16: float, compiled: float, graphs_run: int = 0) -> tuple[Arm, ...]:
    now = ran("as_is", peak_gib=as_is, graphs_run=graphs_run)
    return now, ran("bf16", peak_gib=bf16), ran("bf16_compiled", peak_gib=compiled)


def made_of(arm: Arm, **parts: float) -> Arm:
    """The arm with the parts of its peak as a trial on a GPU counts them."""
    kept = {"weights": 1.0, "fp8_copies": 0.0, "gradients": 1.0, "optimizer": 3.0} | parts
    kept["activations"] = (arm.peak_gib or 0.0) - sum(kept.values())
    return replace(arm, memory=MemoryParts(**{f"{name}_gib": gib for name, gib in kept.items()}))


def told(facts: Facts, *arms: Arm) -> Finding:
    finding = more_memory_than_bf16(timed(facts, *arms))
    assert isinstance(finding, Finding)
    return finding


def test_frozen_layers_keep_their_inputs_until_they_are_compiled(look: Look) -> None:
    model = get_peft_model(in_fp8(), LoraConfig(r=16, target_modules=["0", "2"]))
    finding = told(look(model, tokens=4096), *peaks(38.4, 35.4, 29.5))
    assert (finding.evidence["extra_gib"], finding.treatment.name) == (pytest.approx(3.0), "compile-model")
    exec(finding.treatment.code, {"model": model})
    compiled = timed(look(model, tokens=4096), *peaks(29.5, 35.4, 29.5, graphs_run=16))
    assert more_memory_than_bf16(compiled) is None


def test_like_is_compared_with_like(look: Look) -> None:
    """A mark alone does not make a step compiled: the graphs that ran do."""
    model = in_fp8()
    model.compile()
    facts, arms = look(model, tokens=4096), peaks(24.7, 24.7, 21.7)
    assert more_memory_than_bf16(timed(facts, *arms)) is None
    ran_compiled = peaks(24.7, 24.7, 21.7, graphs_run=4)
    finding = told(facts, *ran_compiled)
    assert (finding.evidence["compared_with"], finding.treatment) == ("bf16_compiled", None)
    own = ran("bf16_as_compiled", peak_gib=24.7, graphs_run=4)
    assert more_memory_than_bf16(timed(facts, *ran_compiled, own)) is None


def test_the_parts_say_where_the_extra_is(look: Look) -> None:
    as_is, bf16, compiled = peaks(24.0, 20.0, 18.0)
    arms = (made_of(as_is, fp8_copies=1.5, gradients=0.8, weights=1.02), made_of(bf16), compiled)
    finding = told(look(in_fp8(), tokens=4096), *arms)
    parts = [value for key, value in finding.evidence.items() if key.startswith("extra_")][1:]
    assert sum(parts) == pytest.approx(finding.evidence["extra_gib"])


@pytest.mark.parametrize(("frozen", "optimizer_gib"), [(True, 0.0), (False, 8.0), (False, 12.0)])
def test_transformer_engine_holds_fp8_copies(
    look: Look, monkeypatch: pytest.MonkeyPatch, frozen: bool, optimizer_gib: float
) -> None:
    """FP8 weights are a fix for frozen weights, or if the optimizer holds master weights already."""
    transformer_engine.install(monkeypatch)
    with torch.device("meta"):
        model = nn.Sequential(transformer_engine.Linear(32768, 32768, bias=False))
    model.requires_grad_(not frozen)
    as_is, bf16, compiled = peaks(42.8, 29.9, 28.9)
    facts = look(model, tokens=4096)
    training = replace(facts.training, optimizer="torch.optim.adamw.AdamW")
    facts = replace(facts, gpus=(Gpu(visible=True, compute_capability="9.0"),), training=training)
    finding = told(facts, made_of(as_is, optimizer=optimizer_gib), made_of(bf16), compiled)
    assert (finding.treatment is not None) is (frozen or optimizer_gib == 12.0)
    if finding.treatment:
        compile(finding.treatment.code, "printed", "exec")
        assert "quantized_model_init" in finding.treatment.code
        assert ("FusedAdam(trained, master_weights=True" in finding.treatment.code) is not frozen
    model[0].primary_weights_in_fp8 = True  # what that context leaves on a module
    stored = replace(look(model, tokens=4096), gpus=facts.gpus)
    assert more_memory_than_bf16(timed(stored, *peaks(29.9, 29.9, 28.9))) is None


@pytest.mark.parametrize(
    ("as_is", "bf16"),
    [(12.3, 13.7), (0.12, 0.08), (20.9, 20.0)],
    ids=["less", "workspaces of a small model", "4.5%"],
)
def test_ordinary_differences(look: Look, as_is: float, bf16: float) -> None:
    assert more_memory_than_bf16(timed(look(in_fp8(), tokens=4096), *peaks(as_is, bf16, bf16))) is None


@pytest.mark.parametrize(
    ("patient", "fires"),
    [("decoder_468m_compiled", False), ("lora", True), ("te_llama_7b", True)],
)
def test_recordings(patient: str, fires: bool) -> None:
    """A job that is faster in FP8 is not told to rebuild its weights; a cause's own fix is enough."""
    report = load_report(RECORDED / f"h200-{patient}.json.gz")
    assert ("MEM001" in {each.code for each in report.findings}) is fires
    assert not any("MEM001" in step.mends for step in report.prescription)


def mlp(kind: type[nn.Module] = nn.Linear, layers: int = 32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(kind(4096, 4096) for _ in range(layers))).bfloat16()


def ledger(facts: Facts) -> Finding:
    finding = finding_of(LEDGER, facts)
    assert finding
    return finding


def test_the_ledger_of_a_step_that_was_not_timed(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = ledger(look(convert_to_float8_training(mlp()), tokens=16384))
    parameters = 32 * 4096 * 4097
    assert finding.severity == "info"
    assert finding.evidence["weights_gib"] == pytest.approx(2 * parameters / 2**30)
    assert finding.evidence["optimizer_gib"] == pytest.approx(4 * parameters / 2**30)
    assert (finding.evidence["fp8_copies_gib"], finding.evidence["linear_inputs_gib"]) == (0.0, 4.0)
    te = transformer_engine.install(monkeypatch)
    finding = ledger(look(mlp(te.Linear), tokens=16384))
    assert finding.evidence["fp8_copies_gib"] == pytest.approx(32 * 4096 * 4096 * 2 / 2**30)


@pytest.mark.parametrize(
    ("optimizer", "layers", "outcome"),
    [
        (torch.optim.SGD, 128, "fires"),
        (torch.optim.Rprop, 32, "not_applicable"),
        (torch.optim.AdamW, 2, "silent"),
    ],
)
def test_the_optimizers_state(look: Look, optimizer: Callable[..., Any], layers: int, outcome: str) -> None:
    model = convert_to_float8_training(mlp(layers=layers))
    facts = look(model, tokens=64, optimizer=optimizer(model.parameters()))
    assert outcome_of(LEDGER, facts).outcome == outcome
    if outcome == "fires":
        finding = ledger(facts)
        assert (finding.evidence["optimizer_gib"], finding.treatment) == (0.0, None)


@pytest.mark.parametrize("patient", ["te_fused", "te_transformer"])
def test_the_ledger_is_what_an_h200_measured(patient: str) -> None:
    facts, *_ = read_saved(RECORDED / f"h200-{patient}.json.gz")
    assert outcome_of(LEDGER, facts).outcome == "not_applicable"
    now, bf16 = (next(arm for arm in facts.trial.arms if arm.name == name) for name in ("as_is", "bf16"))
    held = memory_of(facts, facts.network.fp8, STATES["AdamW"])
    assert now.memory
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(held, part) == pytest.approx(getattr(now.memory, f"{part}_gib"), rel=1e-3)
    assert held.fp8_copies == pytest.approx(now.peak_gib - bf16.peak_gib, rel=0.1)
