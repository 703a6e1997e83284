"""CMP003 on float8 models that a trial compiles: where a break is decides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fp8doctor.facts import Facts
from tests.checks.arms import timed
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.models import Between, Block, Decoder, by_block, float8, ran_in_te
from tests.checks.rules import Look, finding_of, found_by, outcome_of
from tests.checks.trials import tried

pytestmark = pytest.mark.slow

BREAKS = "graph-breaks"


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


def decoder(inside: Between = torch.relu, kind: type[Decoder] = Decoder, **settings: Any) -> Any:
    return kind(block=lambda: Block(between=inside), **settings).bfloat16()


def timed_as_is(model: Any, *compiled: nn.Module) -> Facts:
    """The facts of the model in FP8 with these compiled, or its blocks."""
    by_block(compiled or model.blocks, backend="eager")
    return tried(model, torch.ones(32, 64, dtype=torch.bfloat16), "as_is")


def severity_of(facts: Facts) -> str | None:
    """Return the severity of a finding, None without one."""
    finding = finding_of(BREAKS, facts)
    return finding.severity if finding else None


@pytest.mark.gate("outside", "left out of the graph")
@pytest.mark.parametrize(
    ("build", "whole", "severity"),
    [
        (lambda: float8(decoder(prints_outside_the_graph)), False, None),
        (lambda: float8(decoder(outside=gives_up)), True, "info"),
        (lambda: float8(decoder()), True, None),
        (lambda: float8(decoder(gives_up)), True, "warning"),
        (lambda: decoder(gives_up), True, "info"),
    ],
    ids=["left out of the graph", "outside", "none, as one", "inside", "BF16 has no casts"],
)
def test_where_a_break_is_decides(build: Callable[[], Any], whole: bool, severity: str | None) -> None:
    model = build()
    assert severity_of(timed_as_is(model, *[model] * whole)) == severity


def test_pieces_count_with_or_without_a_counted_break_and_per_micro_batch() -> None:
    """Not every torch counts a frame that it gives up as a break."""
    facts = timed_as_is(float8(decoder(gives_up)))
    (arm,) = facts.trial.arms
    assert arm.cuts[-1].graph_breaks
    for breaks in (0, 2):
        cut = type(arm.cuts[-1])(blocks={}, graph_breaks=breaks)
        finding = found_by(BREAKS, timed(facts, replace(arm, cuts=(cut,))))
        assert finding.severity == "warning"
        assert (finding.evidence["graphs_run"], finding.evidence["whole_regions"]) == (8, 4)
    facts = replace(facts, workload=replace(facts.workload, accumulate=32))
    for regions, severity in ((256, "warning"), (191, "info")):  # 1.5 times as many regions as blocks
        assert severity_of(timed(facts, replace(arm, graphs_run=regions))) == severity


class Checkpointing(Decoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_what_checkpointing_recomputes_is_entered_twice() -> None:
    """A wrapper is compiled, and what it recomputes is in the region."""
    wrapped = decoder(container=lambda blocks: nn.ModuleList(map(checkpoint_wrapper, blocks)))
    for model, regions in ((decoder(kind=Checkpointing), 8), (wrapped, 4)):
        facts = timed_as_is(float8(model))
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
    release: str, kind: str, recipe: str, breaks: bool, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ran_in_te(monkeypatch, recipe, kind)
    model.compile()
    assert (severity_of(with_releases(look(model), transformer_engine=release)) == "info") is breaks
