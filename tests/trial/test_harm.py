"""First, do no harm: every item of it with a planted violation that is prevented, put back or reported."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.trial.reach import AFTER_THE_FIRST_STEP, Reach, attempt, mend, trained
from tests.trial.users_state import differences, flags, of_tensor, owned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_round")]


# Put back: settings of the process, which a model's own forward may change


def new_precision(reach: Reach) -> None:
    torch.backends.fp32_precision = "tf32"


SETTINGS: dict[str, Callable[[Reach], object]] = {
    "counters and metrics of torch.compile": lambda reach: torch.compile(mend, backend="eager")(
        torch.ones(3)
    ),
    "random numbers of torch": lambda reach: torch.manual_seed(5),
    "random numbers of Python": lambda reach: random.seed(5),
    "random numbers of NumPy": lambda reach: numpy.random.seed(5),
    "the default dtype": lambda reach: torch.set_default_dtype(torch.float64),
    "the default device": lambda reach: torch.set_default_device("cpu"),
    "grad mode": lambda reach: torch.set_grad_enabled(False),
    "anomaly mode": lambda reach: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": lambda reach: torch.use_deterministic_algorithms(True, warn_only=True),
    "deterministic fill": lambda reach: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "matmul precision": lambda reach: torch.set_float32_matmul_precision("medium"),
    "TF32": lambda reach: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "TF32, as it is set from torch 2.9 on": new_precision,
    "reduced precision": lambda reach: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "cuDNN's choice of algorithms": lambda reach: setattr(torch.backends.cudnn, "benchmark", True),
    "attention backends": lambda reach: torch.backends.cuda.enable_flash_sdp(False),
    "the number of threads": lambda reach: torch.set_num_threads(torch.get_num_threads() + 1),
    "autocast on a CPU": lambda reach: torch.set_autocast_enabled("cpu", True),
    "autocast on CUDA": lambda reach: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast's cache": lambda reach: torch.set_autocast_cache_enabled(False),
    "hooks on all modules": lambda reach: nn.modules.module.register_module_forward_hook(
        lambda *arguments: None
    ),
    "a new environment variable": lambda reach: os.environ.__setitem__("PLANTED", "1"),
    "a deleted environment variable": lambda reach: os.environ.pop("PATH"),
    "sys.path": lambda reach: sys.path.append("planted"),
    "garbage collection": lambda reach: gc.disable(),
    "signal handlers": lambda reach: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "warning filters": lambda reach: warnings.simplefilter("error", ResourceWarning),
    "Dynamo's settings": lambda reach: setattr(torch._dynamo.config, "recompile_limit", 99),
    "Inductor's settings": lambda reach: setattr(torch._inductor.config, "max_autotune", True),
    "Dynamo's stance": lambda reach: torch.compiler.set_stance("force_eager"),
}


def test_settings_that_a_step_changes_are_put_back() -> None:
    unseen: list[Any] = []

    def change_all(reach: Reach) -> None:
        for item, change in SETTINGS.items():
            now = flags()
            change(reach)
            if not differences(now, flags()):
                unseen.append(item)

    job = trained(change_all)
    before, mine = flags(), owned(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert job.model.reach.forwards >= AFTER_THE_FIRST_STEP
    assert unseen == [], "each of them is seen to change something"
    assert differences(before, flags()) == []
    assert differences(mine, owned(job.model, job.optimizer, job.batch)) == []
    assert trial.harm == ()


# Put back and named: what belongs to the user's model


def set_a_gradient(reach: Reach) -> None:
    reach.model.first.weight.grad = torch.zeros(16, 16)


def replace_a_parameter(reach: Reach) -> None:
    reach.model.first.weight = nn.Parameter(torch.zeros(16, 16))


BELONGINGS: dict[str, tuple[Callable[[Reach], object], str]] = {
    "training flags": (lambda reach: reach.model.eval(), "training flags"),
    "requires_grad": (lambda reach: reach.model.second.weight.requires_grad_(False), "requires_grad"),
    "a forward hook": (
        lambda reach: reach.model.first.register_forward_hook(lambda *arguments: None),
        "hooks",
    ),
    "a forward pre-hook": (
        lambda reach: reach.model.first.register_forward_pre_hook(lambda *arguments: None, with_kwargs=True),
        "hooks",
    ),
    "a backward hook": (
        lambda reach: reach.model.first.register_full_backward_hook(lambda *arguments: None),
        "hooks",
    ),
    "a removed hook": (lambda reach: reach.model.second._forward_hooks.clear(), "hooks"),
    "a first hook on a tensor": (
        lambda reach: reach.model.first.weight.register_hook(lambda gradient: gradient * 0),
        "hooks",
    ),
    "one more hook on a tensor": (
        lambda reach: reach.model.second.weight.register_hook(lambda gradient: gradient * 0),
        "hooks",
    ),
    "a hook after accumulation": (
        lambda reach: reach.model.first.weight.register_post_accumulate_grad_hook(lambda parameter: 1 / 0),
        "hooks",
    ),
    "gradients": (set_a_gradient, "gradients"),
    "a forward put over the class's": (lambda reach: setattr(reach.model, "forward", lambda x: x), "modules"),
    "a compile mark": (lambda reach: reach.model.compile(), "modules"),
    "a class": (lambda reach: setattr(reach.model.first, "__class__", nn.Identity), "modules"),
    "a layer": (lambda reach: setattr(reach.model, "first", nn.Identity()), "modules"),
    "an attribute": (lambda reach: setattr(reach.model, "planted", 1), "modules"),
    "the contents of an attribute": (lambda reach: reach.model.notes.append("planted"), "modules"),
    "a parameter": (replace_a_parameter, "parameters"),
    "a new buffer": (lambda reach: reach.model.register_buffer("planted", torch.ones(1)), "buffers"),
    "the optimizer's settings": (
        lambda reach: reach.optimizer.param_groups[0].update(lr=0.5, planted=1),
        "optimizer settings",
    ),
    "a group of the optimizer": (
        lambda reach: reach.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "optimizer settings",
    ),
    "the optimizer's state": (lambda reach: reach.optimizer.state.clear(), "optimizer settings"),
    "a parameter's part of that state": (
        lambda reach: next(iter(reach.optimizer.state.values())).clear(),
        "optimizer settings",
    ),
    "the data of a parameter": (
        lambda reach: setattr(reach.model.first.weight, "data", torch.zeros(16, 16)),
        "parameters",
    ),
    "the data of a buffer": (lambda reach: setattr(reach.model.scale, "data", torch.zeros(16)), "parameters"),
    "the dtype": (lambda reach: reach.model.bfloat16(), "parameters"),
    "an attribute of a parameter": (
        lambda reach: setattr(reach.model.first.weight, "planted", 1),
        "attributes of parameters",
    ),
}


@pytest.mark.parametrize("item", BELONGINGS)
def test_what_belongs_to_the_model_is_put_back_and_named(item: str) -> None:
    deed, name = BELONGINGS[item]
    job = trained(deed)
    before = owned(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert differences(before, owned(job.model, job.optimizer, job.batch)) == []
    assert f"{name} (put back)" in (trial.harm or ())
    assert trial.reliable is False
    assert f"it changed what it had to leave alone: {', '.join(trial.harm)}" in (trial.reason or "")
    job.model.reach.deed = None
    job.model(torch.ones(4, 16)).sum().backward()


def test_a_step_that_clears_the_gradients_loses_none_and_is_no_harm() -> None:
    job = trained(lambda reach: reach.optimizer.zero_grad())
    before = owned(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert (trial.harm, trial.arms[0].tried) == ((), True)
    assert differences(before, owned(job.model, job.optimizer, job.batch)) == []


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_tensor_that_cannot_be_asked_costs_nothing(kind: str) -> None:
    job = trained(lambda reach: reach.model.eval())
    job.model.register_buffer("odd", BUFFERS[kind]())
    job.model.reach.model = job.model
    mine = [(parameter, parameter.grad) for parameter in job.model.parameters()]
    trial = attempt(job)
    assert trial.arms[0].tried
    assert trial.harm == ("training flags (put back)",)
    assert all(parameter.grad is gradient for parameter, gradient in mine)


# Reported: what nobody can put back


def write(reach: Reach) -> None:
    with torch.no_grad():
        reach.model.first.weight.add_(1)


REPORTED: dict[str, tuple[Callable[[Reach], object], str]] = {
    "a parameter": (write, "parameters"),
    "a parameter behind its version counter": (
        lambda reach: reach.model.first.weight.data.add_(1),
        "parameters",
    ),
    "a buffer": (lambda reach: reach.model.scale.mul_(2), "buffers"),
    "the optimizer's step": (
        lambda reach: reach.optimizer.state[reach.model.second.weight]["step"].add_(1),
        "optimizer state",
    ),
    "the optimizer's moments": (
        lambda reach: reach.optimizer.state[reach.model.second.weight]["exp_avg"].data.zero_(),
        "optimizer state",
    ),
}


@pytest.mark.parametrize("item", REPORTED)
def test_what_cannot_be_put_back_is_reported(item: str) -> None:
    deed, name = REPORTED[item]
    job = trained(deed)
    try:
        trial = attempt(job)
    finally:
        for undo in job.model.reach.left:
            undo()
    assert trial.harm == (name,)
    assert name in (trial.reason or "")
    assert trial.reliable is False


# Prevented


def test_a_step_that_writes_into_its_batch_writes_into_a_copy() -> None:
    job = trained()
    job.loss = lambda output, batch: output.mean() + batch.mul_(2).mean() * 0
    before = of_tensor(job.batch)
    assert attempt(job).harm == ()
    assert of_tensor(job.batch) == before


@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_a_trial_inside_a_region_without_gradients_times_the_step(way: Any) -> None:
    job = trained()
    with way():
        trial = attempt(job)
        assert not torch.is_grad_enabled()
    assert trial.arms[0].tried
    assert trial.harm == ()


class Folder:
    """A scratch folder that goes with its owner, as a spill file or a cache does."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path

    def __del__(self) -> None:
        self.path.rmdir()


class Slot(Folder):
    """A batch that gives its place in a ring back when it dies."""

    def __init__(self, path: Path, x: torch.Tensor) -> None:
        super().__init__(path)
        self.x = x


class Moving(Slot):
    def to(self, device: torch.device) -> Moving:
        self.x = self.x.to(device)
        return self


class Handle(nn.Module):
    """Holds a number that a C library knows, and closes it."""

    def __init__(self, open_handles: Path, number: int) -> None:
        super().__init__()
        self.handle = open_handles / str(number)
        self.handle.mkdir()

    def forward(self, x: torch.Tensor, batch: object = None) -> torch.Tensor:
        assert self.handle.exists()
        return x.mean()

    def __del__(self) -> None:
        self.handle.rmdir()


HOLDERS: dict[str, Callable[[Any, Any], object]] = {
    "an attribute": lambda model, held: setattr(model.first, "held", held),
    "containers": lambda model, held: model.notes.append({"held": (1, [held])}),
    "an object": lambda model, held: setattr(model, "held", functools.partial(print, held)),
    "a hook": lambda model, held: model.first.register_forward_hook(functools.partial(print, held)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_the_death_of_a_copy_frees_nothing_of_the_users(holder: str, tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    job = trained(lambda reach: there.append(path.exists()))
    there: list[bool] = []
    HOLDERS[holder](job.model, Folder(path))
    trial = attempt(job)
    assert (trial.harm, trial.arms[0].tried, there) == ((), True, [True])
    gc.collect()
    assert path.exists()


@pytest.mark.parametrize("kind", [Slot, Moving])
def test_a_batch_that_acts_on_its_death_is_not_copied(kind: type[Slot], tmp_path: Path) -> None:
    job, path = trained(), tmp_path / "slot"
    job.batch, job.training_step = kind(path, job.batch), lambda model, batch: model(batch.x).mean()
    assert attempt(job).arms[0].tried
    gc.collect()
    assert path.exists()


MODULES: dict[str, tuple[Callable[[Any, nn.Module], object], str]] = {
    "a child": (lambda job, handle: job.model.second.register_module("held", handle), "second.held"),
    "in a container": (lambda job, handle: job.model.notes.append({"held": [handle]}), "Handle"),
    "the loss": (lambda job, handle: setattr(job, "loss", handle), "the loss: "),
}


@pytest.mark.parametrize("place", MODULES)
def test_a_module_that_acts_on_its_death_is_refused(place: str, tmp_path: Path) -> None:
    job, handle = trained(), Handle(tmp_path, 3)
    place_it, named = MODULES[place]
    place_it(job, handle)
    trial = attempt(job)
    gc.collect()
    assert (trial.arms, trial.harm, handle.handle.exists()) == ((), (), True)
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
        os.environ["PLANTED"] = "1"
        raise error

    job = trained(deed, at)
    before, mine = flags(), owned(job.model, job.optimizer, job.batch)
    if issubclass(error, Exception):
        assert "hooks (put back)" in attempt(job).harm
    else:
        with pytest.raises(error):
            attempt(job)
    assert differences(before, flags()) == []
    assert differences(mine, owned(job.model, job.optimizer, job.batch)) == []
