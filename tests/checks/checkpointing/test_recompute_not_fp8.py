"""CKP002 on real forms of checkpointing around a stand-in for Transformer Engine's layers, which need a GPU
to be built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fp8doctor.checks.checkpointing.recompute_not_fp8 import recompute_not_fp8
from fp8doctor.facts import Facts, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran, timed
from tests.checks.environment.live import outcome_of
from tests.examine.models import llama
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]

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


class Calls(Block):
    """Its own forward calls checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.up, x, use_reentrant=False)


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


class Wraps(nn.Module):
    """Blocks of its own name, one wrapped inside of the other."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({f"s{i}": nn.Sequential(wrap(Block())) for i in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages.values():
            x = stage(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, reentrant])
@pytest.mark.parametrize(
    "around",
    [
        lambda wrap: model(wrap=wrap),
        lambda wrap: accelerate(Wraps(wrap)),
        lambda wrap: torch.compile(model(wrap=wrap), backend="eager"),
        lambda wrap: nn.DataParallel(model(wrap=wrap)),
    ],
    ids=["a Sequential", "within", "compiled", "module."],
)
def test_the_printed_lines_make_it_silent_and_the_model_still_trains(
    wrap: Callable[[nn.Module], nn.Module],
    around: Callable[[Any], nn.Module],
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = around(wrap)
    finding = recompute_not_fp8(look(made))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.evidence["layers"]) == ("error", 2)
    assert finding.evidence["reentrant"] is (wrap is reentrant)
    assert finding.treatment
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "checkpoint", te_checkpoint, raising=False)
    exec(finding.treatment.code, {"model": made, "torch": torch})
    assert isinstance(recompute_not_fp8(look(made)), NotApplicable)
    made(torch.ones(4, 32)).sum().backward()
    assert all(each.grad is not None for name, each in made.named_parameters() if name.endswith("weight"))


def test_transformers_checkpointing(look: Look) -> None:
    made = llama().train()
    made.model.layers[0].mlp.up_proj = stand_in.Linear(64, 128, bias=False)
    made.gradient_checkpointing_enable()
    finding = recompute_not_fp8(look(accelerate(made)))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.evidence["region"]) == ("error", "model.layers.0")
    assert finding.treatment
    te = type("te", (), {"checkpoint": staticmethod(te_checkpoint)})
    imported, *lines = finding.treatment.code.splitlines()
    assert imported == "import transformer_engine.pytorch as te"
    exec("\n".join(lines), {"model": made, "te": te})
    assert isinstance(recompute_not_fp8(look(made)), NotApplicable)


def test_where_the_autocast_opens_decides(look: Look) -> None:
    for wrap in (with_te_checkpoint, lambda block: checkpoint_wrapper(nn.Linear(4, 4))):
        assert isinstance(recompute_not_fp8(look(model(wrap=wrap))), NotApplicable)
    assert recompute_not_fp8(look(model(block=Opens))) is None
    of_the_user = recompute_not_fp8(look(model(accelerated=False)))
    assert isinstance(of_the_user, Finding)
    assert of_the_user.severity == "info"
    trial = Trial(arms=(), why=Reason.RECOMPUTE_DIFFERS, reason="its own step fails")
    for block in (Block, Opens):
        raised = recompute_not_fp8(replace(look(model(block=block, accelerated=False)), trial=trial))
        assert isinstance(raised, Finding)
        assert raised.severity == "error"


def test_a_call_in_a_forward(look: Look) -> None:
    made = model(block=Calls, wrap=lambda block: block)
    finding = recompute_not_fp8(look(made, batch=BATCH))
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.evidence["form"]) == ("error", "called_in_forward")
    assert outcome_of("CKP002", look(made)).outcome == "unknown"


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
    finding = recompute_not_fp8(look(made))
    assert around == (finding is None)
    if isinstance(finding, Finding):
        assert finding.severity == "error"
        assert "They ran in FP8 before" in finding.explanation


class Around(nn.Module):
    """Opens the autocast in its own forward around the calls of checkpoint, or inside what is recomputed."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant, self.inside = reentrant, inside

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        with te.fp8_autocast(enabled=True):
            return block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        if self.inside:
            for block in self.blocks:
                x = checkpoint(self.run, block, x, use_reentrant=self.reentrant)
            return x
        with te.fp8_autocast(enabled=True):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(
    ("made", "fires"),
    [((False, True), True), ((False, False), True), ((True, False), False)],
)
def test_an_autocast_around_the_call_is_closed_before_the_recompute(
    made: tuple[bool, bool], sick: bool, look: Look
) -> None:
    finding = recompute_not_fp8(look(Around(*made), batch=BATCH))
    assert isinstance(finding, Finding) is sick
    assert not sick or finding.severity == "error"


@pytest.mark.parametrize(("counted", "fires"), [(4, True), (15, False), (16, False)])
def test_the_count_of_matmuls_decides(counted: int, sick: bool, look: Look) -> None:
    as_is = ran("as_is", fp8_gemms=counted, cuts=())
    finding = recompute_not_fp8(timed(look(Around(False, True), batch=BATCH), as_is))
    assert isinstance(finding, Finding) is sick
    if isinstance(finding, Finding):
        assert (finding.severity, finding.evidence["fp8_gemms"]) == ("error", counted)
        assert finding.evidence["fp8_gemms_due"] in (12, 16)
        assert finding.explanation.startswith("One step ran 4 FP8 matmuls. The FP8 layers should run ")
    unknown = look(model(wrap=reentrant))
    assert isinstance(recompute_not_fp8(unknown), Finding)
    assert recompute_not_fp8(timed(unknown, ran("as_is", fp8_gemms=8, cuts=()))) is None
