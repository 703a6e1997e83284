"""CMP002 on real marks, a real Dynamo and real variables: each cause fires, and its fix makes it silent."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8doctor.diagnosis.diagnose import diagnose
from tests.checks.models import Block, by_block, float8
from tests.checks.rules import Look, fix_of, found_by, outcome_of

pytestmark = pytest.mark.slow

VAIN = "compile-without-effect"


def test_a_backend_without_kernels_and_the_users_line_without_it(look: Look) -> None:
    model = nn.Sequential(float8(Block()), float8(Block()))
    by_block(model, backend="eager")
    finding = found_by(VAIN, look(model, tokens=1024))
    assert (finding.severity, finding.evidence["idle_fp8_linears"]) == ("warning", 4)
    assert finding.saving_ms is not None
    model = nn.Sequential(float8(Block()), float8(Block()))
    exec(finding.treatment.code, {"model": model, "torch": torch})
    facts = look(model, tokens=1024)
    assert len(facts.training.compile_marks) == 2
    assert outcome_of(VAIN, facts) == "silent"


def test_dynamo_switched_off(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    model = float8(Block())
    model.compile()
    assert outcome_of(VAIN, look(model)) == "silent"
    with torch._dynamo.config.patch(disable=True):
        assert fix_of(VAIN, look(model)).code == "torch._dynamo.config.disable = False"
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")  # before torch 2.8 any value switches it off
        assert fix_of(VAIN, look(model)).code == "unset TORCH_COMPILE_DISABLE"


def test_torchdynamo_disable(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(model) returns the model itself under the variable: there is no mark to be seen."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    report = diagnose(look(torch.compile(float8(Block())), tokens=16384))
    cause = next(each for each in report.findings if each.name == VAIN)
    assert cause.treatment.code == "unset TORCHDYNAMO_DISABLE"
    assert (cause.evidence["idle_fp8_linears"], cause.saving_ms is not None) == (2, True)
    assert "CMP001" not in {each.code for each in report.findings}
    assert outcome_of(VAIN, look(Block().bfloat16())) == "not_applicable"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "true")  # which does nothing
    assert outcome_of(VAIN, look(torch.compile(float8(Block())))) == "silent"


def stack(*places: Callable[[], nn.Module]) -> nn.Module:
    return float8(nn.Sequential(*(place() for place in places)))


def linear() -> nn.Module:
    return nn.Linear(64, 64)


def test_what_compiles_all_that_matters(look: Look) -> None:
    beside = nn.Module()
    beside.blocks, beside.patches = nn.ModuleList(float8(Block()) for _ in range(2)), nn.Sequential(linear())
    by_block([*beside.blocks, beside.patches])
    assert outcome_of(VAIN, look(beside)) == "silent"
    blocks_and_a_head = stack(Block, Block, linear)
    blocks_and_a_head.compile()
    assert outcome_of(VAIN, look(blocks_and_a_head)) == "silent"
