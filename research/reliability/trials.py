"""Trials on the CPU of training steps that do what they should not: no bit of the user's changes, and
training goes on as if nothing had been."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from fp8doctor import inspect_model
from fp8doctor.report import Report
from fp8doctor.trial.measure import bench, timer
from research.reliability.count import Count
from research.reliability.everything import State, differences, everything, surroundings

WIDTH = 16

STEPS = 3
"""Training steps that follow an inspection."""


class Remembering(nn.Module):
    """State in a deque, a generator and a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: deque[float] = deque([1.0, 2.0], maxlen=2)
        self.noise = torch.Generator().manual_seed(1)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(sum(self.seen) / 2)
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x) * self.seen[-1] + torch.rand(WIDTH, generator=self.noise) - self.average


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Centre(nn.Module):
    """A loss with a moving centre and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, batch: Any = None) -> torch.Tensor:
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return self.scale * (output - self.centre).pow(2).mean()


def float8() -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[0].register_forward_hook(lambda module, arguments, output: output)
    model[2].weight.register_hook(lambda gradient: gradient * 1.0)
    model[2].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "batch norm and dropout": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
    ),
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(16, 16)
    ),
    "state beside the parameters": lambda: nn.Sequential(Remembering(), nn.Linear(WIDTH, WIDTH)),
    "ties": Tied,
    "hooks": hooked,
    "float8": float8,
    "partly frozen": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class World:
    """A user's training in its middle, and all that a careless step can get hold of."""

    def __init__(self, model: str, optimizer: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.model = MODELS[model]()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.9)
        self.other = nn.BatchNorm1d(WIDTH)
        self.average = AveragedModel(self.model) if model != "float8" else copy.deepcopy(self.model)
        self.centre = Centre()
        self.batch = torch.randn(8, WIDTH)
        self.weight = next(each for each in self.model.parameters() if each.requires_grad)
        self.train()

    def train(self) -> None:
        """One honest step of the user's own, whose gradients stay."""
        self.optimizer.zero_grad()
        noise = torch.randn_like(self.batch) + random.random() + float(numpy.random.rand())
        self.centre(self.other(self.model(self.batch + noise))).backward()
        self.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler.step()


Deed = Callable[[World, nn.Module, torch.Tensor], Any]


def in_a_thread(deed: Callable[[], Any]) -> None:
    def quietly() -> None:
        with suppress(Exception):
            deed()

    thread = threading.Thread(target=quietly)
    thread.start()
    thread.join(timeout=3600)


@torch.no_grad()
def average(world: World) -> None:
    for mine, theirs in zip(world.average.parameters(), world.model.parameters(), strict=False):
        mine.lerp_(theirs, 0.1)


def fails(world: World, model: nn.Module, batch: torch.Tensor) -> None:
    raise RuntimeError("planned")


def train_the_original(world: World, model: nn.Module, batch: torch.Tensor) -> None:
    world.model(batch).pow(2).mean().backward()
    world.optimizer.step()


DEEDS: dict[str, Deed] = {
    "nothing": lambda world, model, batch: None,
    "trains the original": train_the_original,
    "steps the optimizer": lambda world, model, batch: world.optimizer.step(),
    "clears the gradients": lambda world, model, batch: world.optimizer.zero_grad(),
    "steps the scheduler": lambda world, model, batch: world.scheduler.step(),
    "sets the rate": lambda world, model, batch: world.optimizer.param_groups[0].update(lr=1.0),
    "adds a group": lambda world, model, batch: world.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "writes to the optimizer's state": lambda world, model, batch: [
        value.zero_()
        for state in world.optimizer.state.values()
        for value in state.values()
        if value is not None
    ],
    "forgets the optimizer's state": lambda world, model, batch: world.optimizer.state.clear(),
    "runs another batch norm": lambda world, model, batch: world.other(batch),
    "updates an averaged model": lambda world, model, batch: (
        world.average.update_parameters(world.model)
        if isinstance(world.average, AveragedModel)
        else average(world)
    ),
    "averages in place": lambda world, model, batch: average(world),
    "writes to .data": lambda world, model, batch: world.weight.data.zero_(),
    "writes into out=": lambda world, model, batch: torch.add(
        world.weight.detach(), 1, out=world.weight.detach()
    ),
    "replaces .data": lambda world, model, batch: setattr(
        world.weight, "data", torch.zeros_like(world.weight)
    ),
    "sets .grad": lambda world, model, batch: setattr(world.weight, "grad", torch.ones_like(world.weight)),
    "adds to .grad": lambda world, model, batch: world.weight.grad.add_(1.0),  # type: ignore[union-attr]
    "takes .grad away": lambda world, model, batch: setattr(world.weight, "grad", None),
    "clips the original's gradients": lambda world, model, batch: nn.utils.clip_grad_norm_(
        world.model.parameters(), 1e-3
    ),
    "backward through the original": lambda world, model, batch: world.model(batch).sum().backward(),
    "loads a state": lambda world, model, batch: world.model.load_state_dict(
        {name: torch.zeros_like(each) for name, each in world.model.state_dict().items()}
    ),
    "eval": lambda world, model, batch: world.model.eval(),
    "freezes": lambda world, model, batch: world.model.requires_grad_(False),
    "hooks": lambda world, model, batch: world.model.register_forward_hook(lambda *arguments: None),
    "replaces a parameter": lambda world, model, batch: setattr(
        list(world.model.modules())[-1], "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))
    ),
    "casts the original": lambda world, model, batch: world.model.bfloat16(),
    "compiles the original": lambda world, model, batch: world.model.compile(backend="eager"),
    "seeds": lambda world, model, batch: (torch.manual_seed(5), random.seed(5), numpy.random.seed(5)),
    "draws": lambda world, model, batch: (torch.rand(3), random.random(), numpy.random.rand()),
    "sets a variable": lambda world, model, batch: os.environ.update(PLANTED="1"),
    "sets the default dtype": lambda world, model, batch: torch.set_default_dtype(torch.float64),
    "writes to the batch": lambda world, model, batch: batch.zero_(),
    "writes to the batch that was given": lambda world, model, batch: world.batch.zero_(),
    "steps in a thread": lambda world, model, batch: in_a_thread(world.optimizer.step),
    "runs backward in a thread": lambda world, model, batch: in_a_thread(
        lambda: world.model(batch).sum().backward()
    ),
    "swallows": lambda world, model, batch: in_a_thread(lambda: fails(world, model, batch)),
    "raises": fails,
}

BEYOND: dict[str, Deed] = {
    "writes through NumPy": lambda world, model, batch: world.weight.detach().numpy().fill(0.0),
    "writes in a thread of its own": lambda world, model, batch: in_a_thread(
        lambda: world.weight.data.zero_()
    ),
    "writes to bytes": lambda world, model, batch: world.weight.untyped_storage().fill_(0),  # type: ignore[no-untyped-call]
}
"""What nobody can refuse or put back, and a trial at least has to name."""

LOSSES = ("none", "function", "module", "method", "hidden module")


def step_with(world: World, deed: Deed, before: bool) -> Callable[..., torch.Tensor]:
    """A training step that does the deed before or after the loss."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if before:
            deed(world, model, batch)
        loss: torch.Tensor = model(batch).pow(2).mean()
        if not before:
            deed(world, model, batch)
        return loss

    return step


def loss_of(world: World, kind: str) -> Callable[..., Any] | None:
    losses: dict[str, Callable[..., Any] | None] = {
        "none": None,
        "function": lambda output, batch: output.pow(2).mean(),
        "module": world.centre,
        "method": world.centre.forward,
        "hidden module": lambda output, batch: world.centre(output, batch),
    }
    return losses[kind]


@contextmanager
def quick() -> Iterator[None]:
    """Trials of a few steps, in which Inductor does not run."""
    lengths = (
        (bench, "MOST_WARM_UP", bench.LEAST_WARM_UP),
        (timer, "LEAST_ROUNDS", 2),
        (timer, "MOST_ROUNDS", 2),
    )
    before = [getattr(module, name) for module, name, _ in lengths]
    stance = torch.compiler.set_stance("default", force_backend="eager")
    gc.freeze()  # a trial collects garbage, half a second with all that the tests have loaded
    try:
        for module, name, value in lengths:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(lengths, before, strict=True):
            setattr(module, name, value)
        stance.__exit__(None, None, None)


def after_training(world: World) -> State:
    """What three more steps make of everything, and of the random numbers that they draw."""
    for _ in range(STEPS):
        world.train()
    modules = [world.model, world.other, world.centre, world.average]
    tensors = [[*each.parameters(), *each.buffers()] for each in modules]
    beside = [list(vars(each).values()) for each in world.model.modules() if type(each) is Remembering]
    kept = everything(tensors, world.optimizer.state_dict(), world.scheduler.state_dict(), beside)
    ways = {way: (kind, content) for way, (kind, _, content) in kept.items() if "hook" not in way}
    return {
        **{
            way: held
            for way, held in ways.items()
            if held[0] not in ("list", "dict", "OrderedDict", "tuple", "deque", "set")
        },
        **surroundings(),
    }


def trials(tries: int, seed: int = 0) -> Count:
    """So many trials, every deed and every loss among them; each against a twin that nobody inspected."""
    count, how = Count("a trial of a hostile training step"), random.Random(seed)
    twins: dict[tuple[str, str], Any] = {}
    with quick():
        for number in range(tries):
            model, optimizer = how.choice(list(MODELS)), how.choice(list(OPTIMIZERS))
            if number % 8 == 7:
                what, deed = f"loss: {LOSSES[number // 8 % len(LOSSES)]}", None
            else:
                what = list(DEEDS)[number % len(DEEDS)]
                deed = DEEDS[what]
            given, early = how.random() < 0.5, how.random() < 0.5
            name = f"{model}, {optimizer}{' given' if given else ''}: {what}{' first' if early else ''}"
            with count.attempt(name) as why:
                why += trial_of(model, optimizer, what, deed, given, early, twins)
    return count


def named(tries: int, seed: int = 0) -> Count:
    """So many trials of steps that nobody can refuse: each trial says what it changed."""
    count, how = Count("a trial of a step that nobody can refuse, whose harm is named"), random.Random(seed)
    with quick():
        for number in range(tries):
            what = list(BEYOND)[number % len(BEYOND)]
            world = World(how.choice(list(MODELS)), how.choice(list(OPTIMIZERS)))
            with count.attempt(what) as why:
                before = everything(world.model)
                harm = inspected(world, BEYOND[what], given=True, early=how.random() < 0.5).facts.trial.harm
                if differences(before, everything(world.model)) and "parameters" not in (harm or ()):
                    why.append(f"harm is {harm}")
    return count


def inspected(world: World, deed: Deed | None, loss: Any = None, *, given: bool, early: bool) -> Report:
    return inspect_model(
        world.model,
        world.batch,
        training_step=step_with(world, deed, early) if deed else None,
        loss=loss,
        optimizer=world.optimizer if given else None,
        device="cpu",
        budget_s=0.3,
    )


def trial_of(
    model: str, optimizer: str, what: str, deed: Deed | None, given: bool, early: bool, twins: dict[Any, Any]
) -> list[str]:
    """What one trial changed."""
    if (model, optimizer) not in twins:
        twins[model, optimizer] = after_training(World(model, optimizer))
    world = World(model, optimizer)
    before = everything(world), surroundings()
    loss = None if deed else loss_of(world, what.removeprefix("loss: "))
    inspected(world, deed, loss, given=given, early=early)
    why = [f"{each} changed" for each in differences(before[0], everything(world))]
    why += [f"{each} changed" for each in differences(before[1], surroundings())]
    then = after_training(world)
    return why + [f"{each} is not the twin's" for each in differences(twins[model, optimizer], then)]
