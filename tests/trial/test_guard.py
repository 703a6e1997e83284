"""A write to what is the user's is refused before it happens: every way there, in a step or a loss."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fp8doctor import inspect_model
from fp8doctor.facts import Target, Trial, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.replica import OriginalTouched
from fp8doctor.trial.measure import bench, timer
from fp8doctor.trial.state.guard import Guard

pytestmark = pytest.mark.slow

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_WARM_UP", bench.LEAST_WARM_UP)
    monkeypatch.setattr(timer, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timer, "MOST_ROUNDS", 2)


class Mine:
    """A model in the middle of training and what belongs to it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.other = nn.BatchNorm1d(16)
        self.model(X).sum().backward()
        self.optimizer.step()
        self.scheduler = StepLR(self.optimizer, 1)

    def now(self) -> list[Any]:
        states = [*self.optimizer.state.values()]
        held = [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.other.parameters(),
            *self.other.buffers(),
            *(value for state in states for value in state.values()),
            *(each.grad for each in self.model.parameters()),
        ]
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        scheduler = {name: value for name, value in vars(self.scheduler).items() if name != "optimizer"}
        hooks = [each._backward_hooks for each in self.model.parameters()]
        return [
            [None if each is None else (id(each), each._version, each.tolist()) for each in held],
            groups,
            repr(scheduler),
            hooks,
        ]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def steps_of(mine: Mine) -> dict[str, tuple[Callable[..., Any], str]]:
    """Training steps that would change what is the user's, and what the trial says of them."""
    model, optimizer, scheduler, other = mine.model, mine.optimizer, mine.scheduler, mine.other
    weight = model[0].weight

    def trains_the_original(_: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach().requires_grad_()

    def steps_the_optimizer(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(copied, batch)
        optimizer.step()
        return loss

    def steps_the_scheduler(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(copied, batch)
        scheduler.step()
        return loss

    def sets_the_rate(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 1.0
        return loss_of(copied, batch)

    def runs_another_batch_norm(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(copied, other(batch))

    def averages(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(0.9)
        return loss_of(copied, batch)

    def writes_to_data(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        weight.data.copy_(torch.zeros(16, 16))
        return loss_of(copied, batch)

    def writes_into_out(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        torch.add(weight.detach(), 1, out=weight.detach())
        return loss_of(copied, batch)

    def decays_the_originals_weight(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(copied, batch) + weight.pow(2).sum()

    def swallows(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with suppress(Exception):
            weight.data.zero_()
        return loss_of(copied, batch)

    def wraps(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        try:
            weight.data.zero_()
        except Exception as error:
            raise ValueError("mine") from error
        return loss_of(copied, batch)

    write = "it would write to '0.weight' of the original"
    return {
        "trains the original": (trains_the_original, "it runs the original itself"),
        "steps the optimizer": (steps_the_optimizer, "it would step your optimizer (AdamW)"),
        "steps the scheduler": (
            steps_the_scheduler,
            "it would step your learning-rate scheduler (StepLR)",
        ),
        "sets the rate": (sets_the_rate, "it would change 'lr' of your optimizer"),
        "runs another BatchNorm": (
            runs_another_batch_norm,
            "it would write to 'num_batches_tracked' of BatchNorm1d, which the step names",
        ),
        "averages": (averages, write),
        "writes to data": (writes_to_data, write),
        "writes into out": (writes_into_out, write),
        "decays the original's weight": (
            decays_the_originals_weight,
            "its backward would reach '0.weight' of the original",
        ),
        "swallows": (swallows, write),
        "wraps": (wraps, write),
    }


WAYS = tuple(steps_of(Mine()))


@pytest.mark.parametrize("given", [True, False], ids=["optimizer given", "optimizer not given"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_would_change_what_is_the_users_is_refused(way: str, given: bool) -> None:
    mine = Mine()
    step, reason = steps_of(mine)[way]
    before = mine.now()
    trial = inspect_model(
        mine.model,
        X,
        training_step=step,
        optimizer=mine.optimizer if given else None,
        device="cpu",
        budget_s=0.5,
    ).facts.trial
    assert (trial.reason, trial.arms) == (reason, ())
    assert mine.now() == before


LATE = {
    "runs the original": (
        lambda mine, copied: mine.model(X),
        "it runs the original itself",
    ),
    "steps the optimizer": (
        lambda mine, copied: mine.optimizer.step(),
        "it would step your optimizer (AdamW)",
    ),
    "steps the scheduler": (
        lambda mine, copied: mine.scheduler.step(),
        "it would step your learning-rate scheduler (StepLR)",
    ),
    "decays the original's weight": (
        lambda mine, copied: mine.model[0].weight.pow(2).sum().backward(),
        "its backward would reach '0.weight' of the original",
    ),
}


def deed_at(
    mine: Mine, at: int, every: int, deed: Callable[[Mine, nn.Module], Any]
) -> tuple[Callable[..., Any], list[int]]:
    """A training step that does something at one call, and again so many calls later; and its calls."""
    calls: list[int] = []

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        loss = loss_of(copied, batch)
        if len(calls) >= at and (len(calls) - at) % every == 0:
            calls[-1] = 1
            deed(mine, copied)
        return loss

    return step, calls


@pytest.mark.gate(
    "runs the original-call 9",
    "steps the optimizer-call 9",
    "steps the scheduler-call 9",
    "decays the original's weight-call 9",
)
@pytest.mark.parametrize("at", [4, 9], ids="call {}".format)
@pytest.mark.parametrize("way", LATE)
def test_what_is_refused_is_refused_in_every_step(way: str, at: int) -> None:
    mine = Mine()
    deed, reason = LATE[way]
    before = mine.now()
    step, calls = deed_at(mine, at, 1, deed)
    trial = inspect_model(
        mine.model, X, training_step=step, optimizer=mine.optimizer, device="cpu", budget_s=0.5
    ).facts.trial
    assert sum(calls) >= 1
    reasons = [trial.reason, *(arm.reason for arm in trial.arms)]
    assert any((each or "").startswith(reason) for each in reasons)
    assert trial.harm in ((), ("optimizer settings (put back)",))  # a scheduler notes that a step began
    assert mine.now() == before


@pytest.mark.parametrize("at", [4, 9, 15], ids="call {}".format)
def test_a_late_write_is_found_and_ends_the_trial(at: int) -> None:
    """A single write is refused in a variant's first step only. In any other it is done once, and named."""
    mine = Mine()
    calls, writes = itertools.count(1), []

    def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(calls) >= at and not writes and _get_current_dispatch_mode() is None:
            writes.append(mine.model[0].weight.data_ptr())
            with torch.no_grad():
                mine.model[0].weight.mul_(0.9)
        return loss_of(copied, batch)

    trial = inspect_model(mine.model, X, training_step=step, device="cpu", budget_s=20).facts.trial
    assert len(writes) == 1
    assert trial.arms == ()
    assert (trial.reason or "").startswith("it writes to '0.weight' of the original")
    assert trial.harm == ("parameters",)


class Centre(nn.Module):
    """A loss with a moving centre and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(16))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return self.scale * (output - self.centre).pow(2).mean()

    def method(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.forward(output, batch)


def trial_with(loss: Any) -> Trial:
    return inspect_model(Mine().model, X, loss=loss, device="cpu", budget_s=0.5).facts.trial


@pytest.mark.parametrize("how", ["module", "method"])
def test_a_loss_that_is_a_module_is_copied(how: str) -> None:
    centre = Centre()
    trial = trial_with(centre if how == "module" else centre.method)
    assert trial.harm == ()
    assert trial.arms[0].tried
    assert (centre.centre._version, centre.centre.tolist(), centre.scale.grad) == (0, [0.0] * 16, None)


class Trainer:
    """As users write them: all that a training needs, held by one object."""

    def __init__(self, mine: Mine) -> None:
        self.optimizer, self.parts = mine.optimizer, {"norms": [mine.other]}

    def step_of(self, way: str) -> Callable[..., Any]:
        def step(copied: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            self.optimizer.step() if way == "optimizer" else self.parts["norms"][0](batch)
            return loss_of(copied, batch)

        return step


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("optimizer", "it would step your optimizer (AdamW)"),
        ("container", "it would write to 'num_batches_tracked' of BatchNorm1d, which the step names"),
    ],
)
def test_what_an_object_holds_that_the_step_names_is_the_users_too(way: str, reason: str) -> None:
    mine = Mine()
    before = mine.now()
    step = Trainer(mine).step_of(way)
    trial = inspect_model(mine.model, X, training_step=step, device="cpu", budget_s=0.5).facts.trial
    assert (trial.reason, trial.arms) == (reason, ())
    assert mine.now() == before


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one that has a step of its own": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "one that follows a loss": ReduceLROnPlateau,
    "one of the user's class": lambda optimizer: type("Own", (StepLR,), {"step": lambda self: 1})(
        optimizer, 1
    ),
}


@pytest.mark.parametrize("item", SCHEDULERS)
def test_every_kind_of_scheduler_is_refused_and_left_as_it_was(item: str) -> None:
    mine = Mine()
    scheduler = SCHEDULERS[item](mine.optimizer)
    step = type(scheduler).step
    another = StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1)
    job = Job(model=mine.model, target=Target(), workload=Workload(), optimizer=mine.optimizer)
    with Guard(job).armed():
        another.optimizer.step()
        another.step()
    with pytest.raises(OriginalTouched, match="your learning-rate scheduler"), Guard(job).armed():
        scheduler.step()
    assert another.last_epoch == 1
    assert type(scheduler).step is step
    assert "guard" not in LRScheduler.step.__globals__["__name__"]


class Remembering(nn.Module):
    """State that is no tensor; a copy shares it, as of an object that no copy can see through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen: deque[int] = deque([1, 2], maxlen=2)
        self.random = torch.Generator().manual_seed(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembering:
        twin = Remembering()
        twin.seen, twin.random = self.seen, self.random
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(3)
        return self.linear(x) + torch.rand(16, generator=self.random)


def test_generators_and_deques_are_put_back_and_named() -> None:
    model = Remembering()
    trial = inspect_model(nn.Sequential(model), X, device="cpu", budget_s=0.5).facts.trial
    assert "modules (put back)" in trial.harm
    assert list(model.seen) == [1, 2]
    assert torch.equal(model.random.get_state(), torch.Generator().manual_seed(1).get_state())
