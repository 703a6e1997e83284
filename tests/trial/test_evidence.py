"""What Dynamo did to an arm, in words: graph breaks, recompilations, and functions that were given up."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import ModuleType

import pytest
import torch
from torch import nn

from fp8doctor.facts import ArmCut, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial import conductor
from fp8doctor.trial.copies.step import VariantPlan, as_it_is
from fp8doctor.trial.measure import evidence
from fp8doctor.trial.measure.budget import Budget, TrialRun
from tests.trial.conducted import conduct
from tests.trial.decoder import trial

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Talking(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        print("forward")
        if x.sum().item() > 0:
            x = x + 1
        return x


def tried(model: nn.Module, step: Callable[..., torch.Tensor] | None = None) -> ArmCut:
    """What the trial records of the model, compiled as it is."""
    model.compile(backend="aot_eager", dynamic=False)
    of = Job(model, Target(), Workload(accumulate=1), torch.ones(2, 8), training_step=step)
    (arm,) = trial(of, VariantPlan("as_is", as_it_is), lists=(), budget_s=30.0).arms
    assert not any("self.linear" in each for each in arm.cuts[0].break_reasons)
    return arm.cuts[0]


def test_a_print_and_a_branch_on_data_are_named_with_their_explanation() -> None:
    seen = tried(Talking())
    assert seen.graph_breaks == len(seen.break_reasons) == 2
    by_print, by_branch = seen.break_reasons
    assert ("`print`" in by_print, "item()" in by_branch, "\n" in by_print) == (True, True, False)
    assert (seen.recompilations, seen.recompile_reasons, seen.left_eager) == (0, (), ())


def test_varying_shapes_reach_the_limit_and_the_function_is_named() -> None:
    lengths = iter(range(2, 10_000))
    seen = tried(Plain(), lambda model, batch: model(torch.ones(next(lengths), 8)).sum())
    assert (seen.graph_breaks, seen.left_eager) == (0, ("Plain.forward",))
    assert seen.recompilations == torch._dynamo.config.recompile_limit - 1
    assert any("size mismatch" in reason for reason in seen.recompile_reasons)
    assert len(seen.recompile_reasons) <= 5


GRAPHS = "torch._inductor.cudagraph_trees"


@pytest.mark.parametrize(
    ("own", "graphs", "inside"), [(None, False, "1"), ("0", False, "0"), (None, True, None)]
)
def test_kineto_is_asked_to_detach_while_the_profile_ends(
    own: str | None, graphs: bool, inside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not against a setting of the user's own, nor beside CUDA graphs."""
    monkeypatch.delenv(evidence.TEARDOWN, raising=False)
    monkeypatch.delitem(sys.modules, GRAPHS, raising=False)
    if own is not None:
        monkeypatch.setenv(evidence.TEARDOWN, own)
    if graphs:
        monkeypatch.setitem(sys.modules, GRAPHS, ModuleType(GRAPHS))
    with suppress(ZeroDivisionError), evidence.detaching():
        seen = os.environ.get(evidence.TEARDOWN)
        raise ZeroDivisionError
    assert (seen, os.environ.get(evidence.TEARDOWN)) == (inside, own)


@pytest.mark.parametrize(("device", "detached"), [("cuda", ["1"]), ("cpu", [])])
def test_profiles_of_a_trial_leave_no_profiler_attached(
    device: str, detached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would slow every later launch of the user's."""
    ended: list[str | None] = []

    class Profile(nullcontext[None]):
        def __exit__(self, *raised: object) -> None:
            ended.append(os.environ.get(evidence.TEARDOWN))

    monkeypatch.setattr(torch.profiler, "profile", lambda **settings: Profile())
    with suppress(ZeroDivisionError), evidence.detached_at_the_end(torch.device(device)):
        raise ZeroDivisionError
    assert ended == detached


@pytest.mark.parametrize(("own_process", "calls"), [(True, 0), (False, 1)])
def test_a_trial_in_the_users_process_ends_its_profiles(
    own_process: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(
        conductor, "detached_at_the_end", lambda device: asked.append(device) or nullcontext()
    )
    of = Job(Plain(), Target(), Workload(accumulate=1), torch.ones(2, 8))
    run = TrialRun(torch.device("cpu"), Budget(30.0), own_process=own_process)
    assert conduct(of, (), [VariantPlan("as_is", as_it_is)], run).arms[0].tried
    assert len(asked) == calls
