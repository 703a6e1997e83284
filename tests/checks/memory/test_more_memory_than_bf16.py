"""MEM001 on real torchao, PEFT and (stand-in) TE models, with peaks as they were measured on an H200."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8doctor.cost.step_cost import with_each
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Gpu, recorded
from tests.checks.arms import ran, timed
from tests.checks.distributed.sharded import processes, shard
from tests.checks.models import float8, mlp
from tests.checks.rules import Look, finding_of, found_by, outcome_of
from tests.stand_ins import transformer_engine

MORE, LEDGER = "more-memory-than-bf16", "memory-ledger"


def peaks(as_is: float, bf16: float, compiled: float, graphs_run: int = 0) -> tuple[Arm, ...]:
    now = ran("as_is", peak_gib=as_is, graphs_run=graphs_run)
    return now, ran("bf16", peak_gib=bf16), ran("bf16_compiled", peak_gib=compiled)


def test_frozen_layers_keep_their_inputs_until_they_are_compiled(look: Look) -> None:
    model = get_peft_model(float8(mlp()), LoraConfig(r=16, target_modules=["0", "2"]))
    finding = found_by(MORE, timed(look(model, tokens=4096), *peaks(38.4, 35.4, 29.5)))
    assert (finding.evidence["extra_gib"], finding.treatment.name) == (pytest.approx(3.0), "compile-model")
    exec(finding.treatment.code, {"model": model})
    compiled = timed(look(model, tokens=4096), *peaks(29.5, 35.4, 29.5, graphs_run=16))
    assert outcome_of(MORE, compiled) == "silent"


def test_like_is_compared_with_like(look: Look) -> None:
    """A mark alone does not make a step compiled: the graphs that ran do."""
    model = float8(mlp())
    model.compile()
    facts, arms = look(model, tokens=4096), peaks(24.7, 24.7, 21.7)
    assert outcome_of(MORE, timed(facts, *arms)) == "silent"
    ran_compiled = peaks(24.7, 24.7, 21.7, graphs_run=4)
    finding = found_by(MORE, timed(facts, *ran_compiled))
    assert (finding.evidence["compared_with"], finding.treatment) == ("bf16_compiled", None)
    own = ran("bf16_as_compiled", peak_gib=24.7, graphs_run=4)
    assert outcome_of(MORE, timed(facts, *ran_compiled, own)) == "silent"


def test_transformer_engine_holds_fp8_copies(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine.install(monkeypatch)
    with torch.device("meta"):
        model = nn.Sequential(transformer_engine.Linear(32768, 32768, bias=False))
    as_is, bf16, compiled = peaks(42.8, 29.9, 28.9)
    facts = look(model, tokens=4096)
    facts = replace(facts, gpus=(Gpu(visible=True, compute_capability="9.0"),))
    assert found_by(MORE, timed(facts, as_is, bf16, compiled)).evidence["extra_gib"] == pytest.approx(12.9)
    model[0].primary_weights_in_fp8 = True  # what that context leaves on a module
    stored = replace(look(model, tokens=4096), gpus=facts.gpus)
    assert outcome_of(MORE, timed(stored, *peaks(29.9, 29.9, 28.9))) == "silent"


def test_ordinary_differences(look: Look) -> None:
    """Less, the workspaces of a small model, and 4.5%."""
    facts = look(float8(mlp()), tokens=4096)
    for as_is, bf16 in ((12.3, 13.7), (0.12, 0.08), (20.9, 20.0)):
        assert outcome_of(MORE, timed(facts, *peaks(as_is, bf16, bf16))) == "silent"


def large(kind: type[nn.Module] = nn.Linear, layers: int = 32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(kind(4096, 4096) for _ in range(layers))).bfloat16()


def test_the_ledger_of_a_step_that_was_not_timed(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found_by(LEDGER, look(float8(large()), tokens=16384))
    parameters = 32 * 4096 * 4097
    assert finding.evidence["weights_gib"] == pytest.approx(2 * parameters / 2**30)
    assert finding.evidence["optimizer_gib"] == pytest.approx(4 * parameters / 2**30)
    assert finding.evidence["fp8_copies_gib"] == 0.0
    te = transformer_engine.install(monkeypatch)
    finding = found_by(LEDGER, look(large(te.Linear), tokens=16384))
    assert finding.evidence["fp8_copies_gib"] == pytest.approx(32 * 4096 * 4096 * 2 / 2**30)


def test_a_surely_higher_peak_is_a_cause_next_to_the_plan(look: Look) -> None:
    """FP8 is faster there, and what frees memory alone is no fix of a step."""
    facts = look(large(transformer_engine.Linear, 128), tokens=16384)
    frozen = with_each(facts, lambda each: replace(each, requires_grad=False))
    for job, fix in ((facts, "optimizer-in-8-bits"), (frozen, "frozen-weights-in-fp8")):
        report = diagnose(replace(job, assumed_gpu="H100"))
        assert report.verdict.status == "fp8_faster"
        assert [(each.name, each.treatment.name) for each in report.findings] == [(LEDGER, fix)]
        assert ([each.name for each in report.answer.causes], report.prescription) == ([LEDGER], ())
    checkpointed = with_each(facts, lambda each: replace(each, checkpointed=each.name))
    assert not recorded(found_by(LEDGER, checkpointed), "explains")
    more = look(large(transformer_engine.Linear, 128), tokens=2**16)
    too_large = diagnose(replace(more, assumed_gpu="L4"))
    assert too_large.verdict.status == "does_not_fit"
    assert not any(each.is_beside for each in too_large.answer.items)


@pytest.mark.parametrize(
    ("all_gather", "checkpointed", "outcome"),
    [(True, False, "fires"), (True, True, "silent"), (False, False, "silent")],
)
def test_fp8_weights_that_fsdp2_cannot_free(
    all_gather: bool, checkpointed: bool, outcome: str, look: Look
) -> None:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(16384, 16384, bias=False)) for _ in range(17)]
    model = float8(nn.Sequential(*blocks), enable_fsdp_float8_all_gather=all_gather)
    for i, block in enumerate(blocks):
        block.compile()
        model[i] = checkpoint_wrapper(block) if checkpointed else block
    with processes(64):
        facts = look(shard(model), tokens=1024)
    assert outcome_of(LEDGER, facts) == outcome
    if finding := finding_of(LEDGER, facts):
        assert finding.evidence["fp8_copies_gib"] == pytest.approx(17 * 16384 * 16384 / 2**30)


@pytest.mark.parametrize(
    ("optimizer", "layers", "outcome"),
    [
        (torch.optim.SGD, 128, "fires"),
        (torch.optim.Rprop, 32, "not_applicable"),
        (torch.optim.AdamW, 2, "silent"),
    ],
)
def test_the_optimizers_state(look: Look, optimizer: Callable[..., Any], layers: int, outcome: str) -> None:
    model = float8(large(layers=layers))
    facts = look(model, tokens=64, optimizer=optimizer(model.parameters()))
    assert outcome_of(LEDGER, facts) == outcome
    if finding := finding_of(LEDGER, facts):
        assert (finding.evidence["optimizer_gib"], finding.treatment) == (0.0, None)
