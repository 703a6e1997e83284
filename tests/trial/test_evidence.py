"""What Dynamo did to an arm, in words: graph breaks, recompilations, and functions that were given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8doctor.facts import ArmCut, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.planning import as_it_is
from fp8doctor.trial.variant import VariantPlan
from tests.trial.conducted import conduct

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)


def tried(model: nn.Module, batch: object, step: Callable[..., torch.Tensor] | None = None) -> ArmCut:
    """What the trial records of the model as it is."""
    job = Job(model=model, target=Target(), workload=Workload(accumulate=1), batch=batch, training_step=step)
    (arm,) = conduct(
        job,
        [],
        [VariantPlan("as_is", as_it_is)],
        TrialRun(torch.device("cpu"), Budget(30)),
    ).arms
    assert arm.cuts[0].alloc_retries is None
    return arm.cuts[0]


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        print("forward")
        if x.sum().item() > 0:
            x = x + 1
        return x


def test_a_print_and_a_branch_on_data_are_named_with_their_explanation() -> None:
    model = Talking()
    model.compile(backend="aot_eager")
    seen = tried(model, torch.ones(2, 8))
    assert seen.graph_breaks == len(seen.break_reasons) == 2
    by_print, by_branch = seen.break_reasons
    assert "`print`" in by_print
    assert "item()" in by_branch
    assert not any("self.linear" in reason or "\n" in reason for reason in seen.break_reasons)
    assert (seen.recompilations, seen.recompile_reasons, seen.left_eager) == (0, (), ())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def test_a_clean_model_compiles_once() -> None:
    model = Plain()
    model.compile(backend="aot_eager")
    seen = tried(model, torch.ones(2, 8))
    assert (seen.graph_breaks, seen.break_reasons) == (0, ())
    assert (seen.recompilations, seen.recompile_reasons, seen.left_eager) == (0, (), ())


def test_varying_shapes_reach_the_limit_and_the_function_is_named() -> None:
    model, lengths = Plain(), iter(range(2, 10_000))
    model.compile(backend="aot_eager", dynamic=False)
    seen = tried(model, torch.ones(2, 8), lambda model, batch: model(torch.ones(next(lengths), 8)).sum())
    assert seen.left_eager == ("Plain.forward",)
    assert seen.recompilations == torch._dynamo.config.recompile_limit - 1
    assert any("size mismatch" in reason for reason in seen.recompile_reasons)
    assert len(seen.recompile_reasons) <= 5
    assert not any("self.linear" in reason for reason in seen.recompile_reasons)
