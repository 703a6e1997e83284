"""Layers that a model's own forward hands to a checkpoint function, and what the cost model makes of them."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.compile_coverage import recomputed
from fp8doctor.cost.step_cost import modelled_step
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.layers import fake_forward, rows
from fp8doctor.trial.measure.budget import Budget, TrialRun
from tests.examine.models import Block

pytestmark = pytest.mark.slow

WIDTH, ROWS = 64, 32


class Plain(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = self.call(number, block, x)
        return self.head(x)

    def call(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class NotReentrant(Plain):
    def call(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Reentrant(Plain):
    def call(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: block(x), x.requires_grad_(), use_reentrant=True)


class EveryOther(Plain):
    def call(self, number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x) if number % 2 else checkpoint(block, x, use_reentrant=False)


def wrapped() -> nn.Module:
    model = Plain()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return model


def job(model: nn.Module) -> Job:
    model = convert_to_float8_training(
        model.bfloat16(), module_filter_fn=lambda layer, name: "head" not in name
    )
    workload = Workload(
        batch_source="given", batch_size=ROWS, tokens=ROWS, accumulate=1, sequence_length=None
    )
    batch = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    return Job(model=model, target=Target(), workload=workload, batch=batch)


def look(model: nn.Module) -> Facts:
    of = job(model)
    return fake_forward.with_forward(of, examine(of))


def busy_ms(facts: Facts) -> float:
    step = modelled_step(facts)
    assert step is not None
    return step.busy_ms


@pytest.mark.parametrize("kind", [NotReentrant, Reentrant])
def test_a_call_in_the_forward_costs_what_a_wrapper_does(kind: Callable[[], nn.Module]) -> None:
    facts = look(kind())
    assert recomputed(facts.network.blocks[0], facts) == 4
    assert facts.network.linears[-1].checkpointed is None
    by_wrapper, kept = look(wrapped()), look(Plain())
    assert busy_ms(facts) == busy_ms(by_wrapper) > busy_ms(kept)


def test_every_other_block_has_the_region_of_its_place_in_the_pattern() -> None:
    """Most blocks are cut away."""
    facts = look(EveryOther(30))
    assert {each.name: each.checkpointed for each in facts.linears()} == {
        "head": None,
        **{
            f"blocks.{number}.{name}": f"blocks.{number}" if number % 2 == 0 else None
            for number in range(30)
            for name in ("up", "down")
        },
    }
    assert {each.active for each in facts.training.checkpointing} == {True}


def test_without_a_forward_no_step_is_modelled() -> None:
    assert modelled_step(examine(job(NotReentrant()))) is None


def test_the_first_copy_of_a_live_job_shows_it_without_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    of = job(Reentrant())
    facts = rows.watch_copy(of, examine(of), TrialRun(torch.device("cpu"), Budget(600.0)))
    assert recomputed(facts.network.blocks[0], facts) == 4
    assert {*facts.workload.rows.values()} == {(ROWS,)}
    assert {each.active for each in facts.training.checkpointing} == {True}
