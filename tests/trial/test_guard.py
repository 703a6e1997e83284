"""A write to what is the user's is refused before it happens: every way there, in a step or a loss."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fp8doctor import inspect_model
from fp8doctor.facts import Target, Trial, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.step import VariantPlan
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import as_it_is
from fp8doctor.trial.state.users import OPTIMIZER
from research.reliability.everything import everything
from tests.trial.conducted import conduct

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_round")]

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Mine:
    """A model in the middle of training and what belongs to it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.weight: Any = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.other = nn.BatchNorm1d(16)
        self.parts = {"norms": [self.other]}
        self.model(X).sum().backward()
        self.optimizer.step()
        self.scheduler = StepLR(self.optimizer, 1)

    def trial(self, step: Callable[..., Any], given: bool = True, budget_s: float = 0.5) -> Trial:
        optimizer = self.optimizer if given else None
        return inspect_model(
            self.model, X, training_step=step, optimizer=optimizer, device="cpu", budget_s=budget_s
        ).facts.trial


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def trains_the_original(mine: Mine) -> None:
    mine.optimizer.zero_grad()
    mine.model(X).pow(2).mean().backward()
    mine.optimizer.step()


@torch.no_grad()
def averages(mine: Mine) -> None:
    mine.weight.mul_(0.9)


def swallows(mine: Mine) -> None:
    with suppress(Exception):
        mine.weight.data.zero_()


RUNS = "it runs the original itself"
STEPS = "it would step your optimizer (AdamW)"
REACHES = "its backward would reach '0.weight' of the original"
WRITES = "it would write to '0.weight' of the original"
OTHER = "it would write to 'num_batches_tracked' of BatchNorm1d, which the step names"

DEEDS: dict[str, tuple[Callable[[Mine], Any], str]] = {
    "trains the original": (trains_the_original, RUNS),
    "steps the optimizer": (lambda mine: mine.optimizer.step(), STEPS),
    "runs a BatchNorm in a container": (lambda mine: mine.parts["norms"][0](X), OTHER),
    "averages": (averages, WRITES),
    "writes into out": (
        lambda mine: torch.add(mine.weight.detach(), 1, out=mine.weight.detach()) and None,
        WRITES,
    ),
    "decays the original's weight": (lambda mine: mine.weight.pow(2).sum().backward(), REACHES),
    "swallows": (swallows, WRITES),
}


@pytest.mark.parametrize(
    ("way", "given"), [*((way, True) for way in DEEDS), ("trains the original", False), ("swallows", False)]
)
def test_a_step_that_would_change_what_is_the_users_is_refused(way: str, given: bool) -> None:
    mine = Mine()
    deed, reason = DEEDS[way]
    before = everything(mine)

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        deed(mine)
        return loss_of(copied, batch)

    trial = mine.trial(step, given)
    assert ((trial.reason or "").startswith(reason), trial.arms) == (True, ())
    assert everything(mine) == before


def test_a_process_of_the_trials_own_may_change_what_is_not_the_model() -> None:
    """A model file's step that updates an average or steps another optimizer is timed; nobody trains on."""
    mine = Mine()
    second = torch.optim.SGD(mine.other.parameters(), lr=0.1)

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mine.other(batch).sum().backward()
        second.step()
        return loss_of(copied, batch)

    given = {"batch": X, "optimizer": mine.optimizer, "training_step": step}
    job = Job(mine.model, Target(), Workload(accumulate=1), **given)  # type: ignore[arg-type]
    run = TrialRun(torch.device("cpu"), Budget(600), own_process=True)
    assert conduct(job, [], [VariantPlan("as_is", as_it_is)], run).arms[0].tried


SCHEDULED = f"it changed what it had to leave alone: {OPTIMIZER}"


@pytest.mark.parametrize(
    ("first", "deed", "reason"),
    [
        *(
            (9, *DEEDS[way])
            for way in ("trains the original", "steps the optimizer", "decays the original's weight")
        ),
        (1, lambda mine: mine.scheduler.step(), SCHEDULED),
    ],
)
def test_a_late_deed_or_a_setting_is_refused_or_put_back(
    first: int, deed: Callable[[Mine], Any], reason: str
) -> None:
    mine = Mine()
    before, calls = everything(mine), itertools.count(1)

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(copied, batch)
        if next(calls) >= first:
            deed(mine)
        return loss

    trial = mine.trial(step)
    assert any(reason in (each or "") for each in (trial.reason, *(arm.reason for arm in trial.arms)))
    assert everything(mine) == before


@pytest.mark.parametrize("at", [4, 15])
def test_a_late_write_is_found_and_ends_the_trial(at: int) -> None:
    """A single write is refused in a variant's first step only. In any other it is done once, and named."""
    mine = Mine()
    calls, writes = itertools.count(1), []

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(calls) >= at and not writes and _get_current_dispatch_mode() is None:
            writes.append(at)
            averages(mine)
        return loss_of(copied, batch)

    trial = mine.trial(step, given=False, budget_s=20)
    assert (writes, trial.arms, trial.harm) == ([at], (), ("parameters",))
    assert (trial.reason or "").startswith("it writes to '0.weight' of the original")


class Centre(nn.Module):
    """A loss with a moving centre and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(16))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return self.scale * (output - self.centre).pow(2).mean()


def test_a_loss_that_is_a_module_is_copied() -> None:
    centre = Centre()
    trial = inspect_model(Mine().model, X, loss=centre.forward, device="cpu", budget_s=0.5).facts.trial
    assert (trial.harm, trial.arms[0].tried) == ((), True)
    assert (centre.centre._version, centre.centre.tolist(), centre.scale.grad) == (0, [0.0] * 16, None)


def test_parameters_of_a_loss_that_is_a_function_get_no_gradient() -> None:
    """Of which the optimizer holds one."""
    mine, temperature, margin = Mine(), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.pow(2).mean() * temperature.exp() + margin

    mine.optimizer.add_param_group({"params": [temperature]})
    loss(mine.model(X), X).backward()
    margin.grad = None
    before = everything(mine), everything(temperature), everything(margin)
    model, given = mine.model, {"loss": loss, "optimizer": mine.optimizer}
    trial = inspect_model(model, X, device="cpu", budget_s=0.5, **given).facts.trial  # type: ignore[arg-type]
    assert (trial.arms, trial.harm) == ((), ())
    assert "of your loss" in (trial.reason or "")
    assert (everything(mine), everything(temperature), everything(margin)) == before
