"""CMP003 on float8 models that a trial compiles: where a break is decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.facts import Facts
from tests.checks.arms import timed
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.checks.trials import tried
from tests.stand_ins import packages
from tests.stand_ins import transformer_engine as stand_in

pytestmark = pytest.mark.slow

BREAKS = "graph-breaks"
BATCH = torch.ones(32, 32, dtype=torch.bfloat16)


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


def prints_outside_the_graph(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        print(end="")
    return x


def gives_up(x: torch.Tensor) -> torch.Tensor:
    try:
        print(end="")
    except OSError:
        return x
    return x


class Block(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(32, 64), nn.Linear(64, 32), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(torch.relu(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, inside: Any = nothing, outside: Any = nothing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inside) for _ in range(4))
        self.head, self.outside = nn.Linear(32, 32), outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outside(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def float8(model: nn.Module) -> Any:
    return convert_to_float8_training(model.bfloat16())


def by_block(model: nn.Module) -> Any:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def as_one(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def severity_of(facts: Facts) -> str | None:
    """Return the severity of a finding, None without one."""
    finding = finding_of(BREAKS, facts)
    return finding.severity if finding else None


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("build", "severity"),
    [
        (lambda: by_block(float8(Decoder())), None),  # compiled blocks in an uncompiled loop are no break
        (lambda: by_block(float8(Decoder(inside=prints_outside_the_graph))), None),
        (lambda: as_one(float8(Decoder(outside=gives_up))), "info"),
        pytest.param(lambda: as_one(float8(Decoder())), None, marks=NIGHTLY),
        pytest.param(lambda: as_one(float8(Decoder(inside=gives_up))), "warning", marks=NIGHTLY),
        pytest.param(lambda: as_one(Decoder(inside=gives_up).bfloat16()), "info", marks=NIGHTLY),
    ],
    ids=["none", "left out of the graph", "outside", "none, as one", "inside, as one", "BF16 has no casts"],
)
def test_where_a_break_is_decides(build: Callable[[], nn.Module], severity: str | None) -> None:
    assert severity_of(tried(build(), BATCH, "as_is")) == severity


def test_pieces_count_with_or_without_a_counted_break_and_per_micro_batch() -> None:
    """Not every torch counts a frame that it gives up as a break."""
    facts = tried(by_block(float8(Decoder(inside=gives_up))), BATCH, "as_is")
    (arm,) = facts.trial.arms
    assert arm.cuts[-1].graph_breaks
    for breaks in (0, 2):
        cut = type(arm.cuts[-1])(blocks={}, graph_breaks=breaks)
        finding = found_by(BREAKS, timed(facts, msgspec.structs.replace(arm, cuts=(cut,))))
        assert finding.severity == "warning"
        assert (finding.evidence["graphs_run"], finding.evidence["whole_regions"]) == (8, 4)
    facts = msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, accumulate=32))
    for regions, severity in ((256, "warning"), (191, "info")):  # 1.5 times as many regions as blocks
        assert severity_of(timed(facts, msgspec.structs.replace(arm, graphs_run=regions))) == severity


class Checkpointing(Decoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def called(inside: Any) -> nn.Module:
    return by_block(Checkpointing(inside))


def wrapped_inside(inside: Any) -> nn.Module:
    """The wrapper is compiled, and what it recomputes is in the region."""
    model = Decoder(inside)
    for number in range(4):
        model.blocks[number] = checkpoint_wrapper(model.blocks[number])
    return by_block(model)


@pytest.mark.parametrize(("build", "regions"), [(called, 8), (wrapped_inside, 4)])
def test_what_checkpointing_recomputes_is_entered_twice(
    build: Callable[[Any], nn.Module], regions: int
) -> None:
    facts = tried(float8(build(nothing)), BATCH, "as_is")
    assert facts.trial.arms[0].graphs_run == regions
    assert outcome_of(BREAKS, facts) == "silent"


@pytest.mark.parametrize(
    ("release", "kind", "recipe", "breaks"),
    [
        ("2.19", "Linear", "Float8CurrentScaling", True),
        ("2.20.2", "Linear", "Float8CurrentScaling", False),
        ("2.20.2", "Linear", "DelayedScaling", True),
        ("2.20.2", "LayerNormLinear", "Float8CurrentScaling", True),
        ("no version", "Linear", "DelayedScaling", False),
    ],
)
def test_modules_of_transformer_engine_are_known_to_break(
    release: str,
    kind: str,
    recipe: str,
    breaks: bool,
    look: Callable[..., Facts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te: Any = stand_in.install(monkeypatch)
    model = nn.Sequential(getattr(te, kind)(32, 32))
    with te.autocast(recipe=getattr(stand_in, recipe)()):
        model(torch.ones(32, 32))
    model.compile()
    assert (severity_of(with_releases(look(model), transformer_engine=release)) == "info") is breaks


def test_known_breaks_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    te: Any = stand_in.install(monkeypatch)
    packages.stand_in(monkeypatch, transformer_engine="2.8.0")
    model = nn.Sequential(te.Linear(32, 32))
    model.compile()
    report = inspect_model(model, torch.ones(32, 32), trial=False, progress=False)
    assert "CMP003" in {each.code for each in report.findings}
    assert severity_of(timed(report.facts)) == "info"
