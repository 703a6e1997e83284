"""CKP002 on real forms of checkpointing around a stand-in for Transformer Engine's layers, which need a GPU
to be built."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fp8doctor.facts import Trial
from fp8doctor.facts.arm_names import Reason
from tests.checks.arms import ran, timed
from tests.checks.rules import Look, finding_of, found_by, outcome_of
from tests.examine.models import llama
from tests.stand_ins import transformer_engine as stand_in

RECOMPUTE = "recompute-not-fp8"
BATCH = torch.ones(4, 32)


def te_checkpoint(function: Any, *arguments: Any, **settings: Any) -> Any:
    """Named as Transformer Engine's own; it opens the autocast again."""
    with stand_in.autocast():
        return function(*arguments)


te_checkpoint.__module__ = "transformer_engine.pytorch.distributed"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch, "fp8")
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = stand_in.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Opens(Block):
    """Opens the autocast itself, so that the recompute passes through it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with te.fp8_autocast(enabled=True):
            return self.up(x)


def model(
    block: type[nn.Module] = Block,
    wrap: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    accelerated: bool = True,
) -> nn.Module:
    made = nn.Sequential(*(wrap(block()) for _ in range(2)))
    return accelerate(made) if accelerated else made


def accelerate(made: nn.Module) -> nn.Module:
    """Accelerate's own wrapper around the forward."""
    made.forward = MethodType(contextual_fp8_autocast(made.forward, stand_in.DelayedScaling()), made)
    return made


def with_te_checkpoint(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, checkpoint_fn=te_checkpoint)


def reentrant(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, reentrant])
def test_the_printed_lines_make_it_silent_and_the_model_still_trains(
    wrap: Callable[[nn.Module], nn.Module], look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = model(wrap=wrap)
    if wrap is reentrant:
        made = torch.compile(made, backend="eager")
    finding = found_by(RECOMPUTE, look(made))
    assert (finding.severity, finding.evidence["layers"]) == ("error", 2)
    assert finding.evidence["reentrant"] is (wrap is reentrant)
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "checkpoint", te_checkpoint, raising=False)
    exec(finding.treatment.code, {"model": made, "torch": torch})
    assert outcome_of(RECOMPUTE, look(made)) == "not_applicable"
    made(torch.ones(4, 32)).sum().backward()
    assert all(each.grad is not None for name, each in made.named_parameters() if name.endswith("weight"))


def test_transformers_checkpointing(look: Look) -> None:
    made = llama().train()
    made.model.layers[0].mlp.up_proj = stand_in.Linear(64, 128, bias=False)
    made.gradient_checkpointing_enable()
    finding = found_by(RECOMPUTE, look(accelerate(made)))
    assert (finding.severity, finding.evidence["region"]) == ("error", "model.layers.0")
    te = type("te", (), {"checkpoint": staticmethod(te_checkpoint)})
    _, *lines = finding.treatment.code.splitlines()
    exec("\n".join(lines), {"model": made, "te": te})
    assert outcome_of(RECOMPUTE, look(made)) == "not_applicable"


def test_where_the_autocast_opens_decides(look: Look) -> None:
    assert outcome_of(RECOMPUTE, look(model(wrap=with_te_checkpoint))) == "not_applicable"
    assert outcome_of(RECOMPUTE, look(model(block=Opens))) == "silent"
    assert found_by(RECOMPUTE, look(model(accelerated=False))).severity == "info"
    trial = Trial(arms=(), why=Reason.RECOMPUTE_DIFFERS, reason="its own step fails")
    for block in (Block, Opens):
        raised = replace(look(model(block=block, accelerated=False)), trial=trial)
        assert found_by(RECOMPUTE, raised).severity == "error"


@pytest.mark.parametrize("around", [True, False])
def test_a_backward_that_ran_proves_it(around: bool, look: Look) -> None:
    """In FP8 where the autocast was still open, else in BF16."""
    made, x = model(wrap=reentrant, accelerated=False), torch.ones(4, 32, requires_grad=True)
    with stand_in.autocast():
        output = made(x).sum()
        if around:
            output.backward()
    if not around:
        output.backward()
    finding = finding_of(RECOMPUTE, look(made))
    assert (finding and finding.severity) == (None if around else "error")


class Around(nn.Module):
    """Opens the autocast in its own forward around the calls of checkpoint, or inside what is recomputed."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Opens if inside else Block)() for _ in range(4))
        self.reentrant, self.inside = reentrant, inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with nullcontext() if self.inside else te.fp8_autocast(enabled=True):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(("inside", "reentrant"), [(False, True), (False, False), (True, False)])
def test_an_autocast_around_the_call_is_closed_before_the_recompute(
    inside: bool, reentrant: bool, look: Look
) -> None:
    made = Around(inside, reentrant)
    finding = finding_of(RECOMPUTE, look(made, batch=BATCH))
    assert (finding and finding.severity) == (None if inside else "error")
    assert outcome_of(RECOMPUTE, look(made)) == "unknown", "no batch, no forward"


@pytest.mark.parametrize(("counted", "fires"), [(4, True), (15, False), (16, False)])
def test_the_count_of_matmuls_decides(counted: int, fires: bool, look: Look) -> None:
    as_is = ran("as_is", fp8_gemms=counted, cuts=())
    finding = finding_of(RECOMPUTE, timed(look(Around(False, True), batch=BATCH), as_is))
    assert (finding is not None) is fires
    if finding:
        assert (finding.severity, finding.evidence["fp8_gemms"]) == ("error", counted)
        assert finding.evidence["fp8_gemms_due"] in (12, 16)
    unknown = look(model(wrap=reentrant))
    assert outcome_of(RECOMPUTE, timed(unknown, ran("as_is", fp8_gemms=8, cuts=()))) == "silent"
