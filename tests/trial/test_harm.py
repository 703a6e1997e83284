"""First, do no harm: every item of it with a planted violation that is prevented, put back or reported."""

from __future__ import annotations

import functools
import gc
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fp8doctor.trial.state import guard
from fp8doctor.trial.state.users import MODEL, OPTIMIZER
from research.reliability.everything import differences, everything, settings
from tests.trial.reach import AFTER_THE_FIRST_STEP, Reach, attempt, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_round")]

Deed = Callable[[Reach], object]


# Put back: settings of the process that the contract names

SETTINGS: list[Deed] = [
    lambda reach: torch.manual_seed(5),
    lambda reach: random.seed(5),
    lambda reach: numpy.random.seed(5),
    lambda reach: torch.set_default_dtype(torch.float64),
    lambda reach: torch.set_default_device("cpu"),
    lambda reach: torch.set_grad_enabled(False),
    lambda reach: torch.set_autocast_enabled("cpu", True),
    lambda reach: torch.set_autocast_dtype("cuda", torch.bfloat16),
    lambda reach: sys.path.append("planted"),
    lambda reach: warnings.simplefilter("error", ResourceWarning),
]


def test_settings_that_a_step_changes_are_put_back() -> None:
    unseen: list[int] = []

    def change_all(reach: Reach) -> None:
        for number, change in enumerate(SETTINGS):
            now = settings()
            change(reach)
            if not differences(now, settings()):
                unseen.append(number)

    job = trained(change_all)
    before, mine = settings(), everything(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert job.model.reach.forwards >= AFTER_THE_FIRST_STEP
    assert unseen == [], "each of them is seen to change something"
    assert differences(before, settings()) == []
    assert differences(mine, everything(job.model, job.optimizer, job.batch)) == []
    assert trial.harm == ()


# Put back and named: what belongs to the user's model


Change = Callable[[Any, Any], object]

BELONGINGS: list[tuple[str, Change]] = [
    *(
        (MODEL, each)
        for each in (
            lambda model, optimizer: model.eval(),
            lambda model, optimizer: model.second.weight.requires_grad_(False),
            lambda model, optimizer: model.first.register_forward_pre_hook(lambda *_: 0, with_kwargs=True),
            lambda model, optimizer: model.second._forward_hooks.clear(),
            lambda model, optimizer: model.first.weight.register_hook(lambda gradient: gradient * 0),
            lambda model, optimizer: model.second.weight.register_hook(lambda gradient: gradient * 0),
            lambda model, optimizer: model.first.weight.register_post_accumulate_grad_hook(print),
            lambda model, optimizer: setattr(model.first.weight, "grad", torch.zeros(16, 16)),
            lambda model, optimizer: model.compile(),
            lambda model, optimizer: setattr(model, "first", nn.Identity()),
            lambda model, optimizer: model.notes.append("planted"),
            lambda model, optimizer: setattr(model.first, "weight", nn.Parameter(torch.zeros(16, 16))),
            lambda model, optimizer: model.bfloat16(),
            lambda model, optimizer: setattr(model.first.weight, "planted", 1),
            lambda model, optimizer: model.register_buffer("planted", torch.ones(1)),
        )
    ),
    *(
        (OPTIMIZER, each)
        for each in (
            lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5, planted=1),
            lambda model, optimizer: optimizer.add_param_group({"params": [torch.ones(1)]}),
            lambda model, optimizer: next(iter(optimizer.state.values())).clear(),
            lambda model, optimizer: optimizer.state.clear(),
        )
    ),
]


@pytest.mark.parametrize(("name", "change"), BELONGINGS)
def test_what_belongs_to_the_model_is_put_back_and_named(name: str, change: Change) -> None:
    job = trained(lambda reach: change(reach.model, reach.optimizer))
    before = everything(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert differences(before, everything(job.model, job.optimizer, job.batch)) == []
    assert name in (trial.harm or ())
    assert trial.reliable is False
    job.model.reach.deed = None
    job.model(torch.ones(4, 16)).sum().backward()


def test_a_step_that_clears_the_gradients_loses_none_and_is_no_harm() -> None:
    job = trained(lambda reach: reach.optimizer.zero_grad())
    before = everything(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert (trial.harm, trial.arms[0].tried) == ((), True)
    assert differences(before, everything(job.model, job.optimizer, job.batch)) == []


def test_a_tensor_that_cannot_be_asked_costs_nothing() -> None:
    job = trained(lambda reach: reach.model.eval())
    parts = [torch.randn(2), torch.randn(3)]
    for odd in (
        torch.quantize_per_tensor(parts[1], 0.1, 0, torch.qint8),
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        torch.eye(3).to_sparse(),
    ):
        job.model.register_buffer(f"odd{len(job.model._buffers)}", odd)
    mine = [(parameter, parameter.grad) for parameter in job.model.parameters()]
    trial = attempt(job)
    assert trial.arms[0].tried
    assert trial.harm == (MODEL,)
    assert all(parameter.grad is gradient for parameter, gradient in mine)


# Reported: what nobody can put back


@torch.no_grad()
def write(reach: Reach) -> None:
    reach.model.first.weight.add_(1)
    reach.model.scale.mul_(2)
    reach.optimizer.state[reach.model.second.weight]["step"].add_(1)


def write_behind_the_version_counters(reach: Reach) -> None:
    reach.model.first.weight.data.add_(1)
    reach.model.scale.data.mul_(2)
    reach.optimizer.state[reach.model.second.weight]["exp_avg"].data.zero_()


@pytest.mark.parametrize("deed", [write, write_behind_the_version_counters])
def test_what_cannot_be_put_back_is_reported(deed: Deed) -> None:
    trial = attempt(trained(deed))
    assert trial.harm == ("buffers", "optimizer state", "parameters")
    assert ", ".join(trial.harm) in (trial.reason or "")
    assert trial.reliable is False


@pytest.mark.parametrize("begin", [0, 1])
def test_every_byte_of_an_odd_storage_is_summed_in_little_memory(
    begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that lies in a mapped file is a view of the whole file, of any length."""
    monkeypatch.setattr(guard, "CHUNK", 2**10)
    of = trained()
    octets = numpy.zeros(100_008 + begin, dtype=numpy.uint8)[begin:-1]
    of.model.register_buffer("odd", torch.from_numpy(octets))
    watching = guard.Guard(of)
    with torch.profiler.profile(profile_memory=True) as profile:
        before = watching.sums()
    assert max(each.cpu_memory_usage for each in profile.events()) < 2**16
    for place in (0, 7, 50_000, len(octets) - 8, len(octets) - 1):
        octets[place] = 1
        assert watching.changed(before) == ["buffers"]
        octets[place] = 0
    assert watching.changed(before) == []


# Prevented


def test_a_step_that_writes_into_its_batch_writes_into_a_copy() -> None:
    job = trained()
    job.loss = lambda output, batch: output.mean() + batch.mul_(2).mean() * 0
    before = everything(job.batch)
    assert attempt(job).harm == ()
    assert everything(job.batch) == before


def test_a_trial_inside_a_region_without_gradients_times_the_step() -> None:
    job = trained()
    with torch.inference_mode():
        trial = attempt(job)
        assert not torch.is_grad_enabled()
    assert trial.arms[0].tried
    assert trial.harm == ()


class Folder:
    """A scratch folder that goes with its owner, as a spill file or a cache does."""

    def __init__(self, path: Path, x: torch.Tensor | None = None) -> None:
        path.mkdir()
        self.path, self.x = path, x

    def to(self, device: torch.device) -> Folder:
        return self

    def __del__(self) -> None:
        self.path.rmdir()


class Handle(nn.Module):
    """Holds a number that a C library knows, and closes it."""

    def __init__(self, handle: Path) -> None:
        super().__init__()
        self.folder = Folder(handle)

    def forward(self, x: torch.Tensor, batch: object = None) -> torch.Tensor:
        return x.mean()

    def __del__(self) -> None:
        self.folder.closed = True


def test_the_death_of_a_copy_frees_nothing_of_the_users(tmp_path: Path) -> None:
    held = [Folder(tmp_path / str(number)) for number in range(5)]
    job = trained(lambda reach: there.extend(each.path.exists() for each in held))
    there: list[bool] = []
    job.model.first.held = held[0]
    job.model.notes.append({"held": (1, [held[1]])})
    job.model.held = functools.partial(print, held[2])
    job.model.first.register_forward_hook(functools.partial(print, held[3]))
    held[4].x, job.batch = job.batch, held[4]
    job.training_step = lambda model, batch: model(batch.x).mean()
    trial = attempt(job)
    assert (trial.harm, trial.arms[0].tried, there) == ((), True, [True] * 5)
    gc.collect()
    assert all(each.path.exists() for each in held)


MODULES: dict[str, tuple[Callable[[Any, nn.Module], object], str]] = {
    "a child": (lambda job, handle: job.model.second.register_module("held", handle), "second.held"),
    "in a container": (lambda job, handle: job.model.notes.append({"held": [handle]}), "Handle"),
    "the loss": (lambda job, handle: setattr(job, "loss", handle), "the loss: "),
}


@pytest.mark.parametrize("place", MODULES)
def test_a_module_that_acts_on_its_death_is_refused(place: str, tmp_path: Path) -> None:
    job, handle = trained(), Handle(tmp_path / "3")
    place_it, named = MODULES[place]
    place_it(job, handle)
    trial = attempt(job)
    gc.collect()
    assert (trial.arms, trial.harm, hasattr(handle.folder, "closed")) == ((), (), False)
    assert named in trial.reason
    assert "__del__" in trial.reason


# When it raises


class Planted(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Planted])
@pytest.mark.parametrize("at", [1, 3, 6], ids=["first step", "warm-up", "timing"])
def test_all_is_as_before_when_it_is_interrupted(error: type[BaseException], at: int) -> None:
    def deed(reach: Reach) -> None:
        reach.model.eval()
        reach.model.first.register_forward_hook(lambda *arguments: None)
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        raise error

    job = trained(deed, at)
    before, mine = settings(), everything(job.model, job.optimizer, job.batch)
    if issubclass(error, Exception):
        assert MODEL in attempt(job).harm
    else:
        with pytest.raises(error):
            attempt(job)
    assert differences(before, settings()) == []
    assert differences(mine, everything(job.model, job.optimizer, job.batch)) == []
