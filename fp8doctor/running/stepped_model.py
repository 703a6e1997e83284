"""Find the model whose parameters an optimizer steps, and the modules to watch.

Objects hidden by ``gc.freeze()`` count: long trainings freeze before they fork workers or after their first
step.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from fp8doctor.examine.compile_marks import compile_mark
from fp8doctor.examine.training_state import written_back
from fp8doctor.loading.job import is_trainer
from fp8doctor.stacks.looking import (
    children_of,
    modules_of,
    parameters_of,
    read,
    read_class,
    state_of,
)
from fp8doctor.stacks.tensors import whole_size


class LiveObjects:
    """All live objects; keeps none of them alive."""

    def __init__(self) -> None:
        self._noted: dict[int, weakref.ref[Any]] = {}

    def note(self, objects: Iterable[Any]) -> None:
        """Remember objects for as long as other code holds them."""
        for each in objects:
            with contextlib.suppress(TypeError):
                self._noted[id(each)] = weakref.ref(each)

    def __iter__(self) -> Iterator[Any]:
        """Yield the garbage collector's and the noted objects, some twice."""
        yield from gc.get_objects()
        for reference in list(self._noted.values()):
            if (each := reference()) is not None:
                yield each

    def forget(self) -> None:
        self._noted.clear()


@dataclass
class Stepper:
    """What is known of an optimizer that has stepped."""

    elements: int
    """Of all parameters."""
    steps: int = 0


class Steppers:
    """The optimizers of a script that step; keeps none alive."""

    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()
        self.all_steps = 0

    def count(self, optimizer: Optimizer) -> Stepper:
        """Count a step."""
        stepper = self.known.get(optimizer)
        if stepper is None:
            elements = sum(each.numel() for each in held(optimizer))
            stepper = self.known[optimizer] = Stepper(elements)
        self.all_steps += 1
        stepper.steps += 1
        return stepper

    def largest(self) -> Stepper:
        return max(self.known.values(), key=lambda each: each.elements)


MOST = 0.5
"""Least share of the stepped elements that a model owns."""


@dataclass(frozen=True)
class Ownership:
    """The model of the stepped parameters."""

    model: nn.Module
    """The outermost module that owns most of them."""
    callable: tuple[nn.Module, ...]
    """Modules outside compiled regions that own most of them, from the outside in."""
    compiled: bool
    """Part of the model carries a mark of torch.compile."""
    trainer: Any
    """The model's transformers Trainer, or None."""
    optimizers: tuple[Optimizer, ...]
    """All live optimizers."""
    wrapper: Any = None
    """The wrapper of an optimizer that steps copies of the parameters."""


def owner_of(optimizer: Optimizer, living: LiveObjects) -> Ownership | None:
    """Find the model that an optimizer trains, also if it steps copies or some parameters were replaced."""
    living.note([optimizer])
    for parameters, wrapper in _trained_by(optimizer, living):
        found = owner(parameters, living)
        if found is not None:
            living.note([] if wrapper is None else [wrapper])
            return replace(found, wrapper=wrapper)
    return None


def _trained_by(optimizer: Optimizer, living: LiveObjects) -> Iterator[tuple[list[nn.Parameter], Any]]:
    """Yield parameters of the model, and the optimizer's wrapper."""
    stepped = held(optimizer)
    yield stepped, None
    copies = {id(each) for each in stepped}
    kinds: dict[type, bool] = {}
    for each in living:
        kind = type(each)
        if kind not in kinds:
            kinds[kind] = all(read_class(kind, name) is not None for name in ("step", "zero_grad"))
        if kinds[kind] and any(value is optimizer for value in state_of(each).values()):
            yield [parameter for parameter in written_back(each) if id(parameter) not in copies], each
    trained = [each for each in stepped if each.grad is not None]
    if 0 < len(trained) < len(stepped):
        yield trained, None


def held(optimizer: Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def owner(stepped: Iterable[nn.Parameter], living: LiveObjects) -> Ownership | None:
    """Find the model that owns at least half of the stepped parameters.

    One pass over all objects (0.1 to 0.3 s), which notes what may be searched again.
    """
    wanted = {id(each): whole_size(each) for each in stepped}
    total = sum(wanted.values())
    modules, trainers, optimizers = _alive(living)
    living.note((*modules, *trainers, *optimizers))
    below = {id(child) for module in modules for child in children_of(module).values()}
    roots = [each for each in modules if id(each) not in below]
    owned = {id(each): _owned(each, wanted) for each in roots}
    model = max(roots, key=lambda each: owned[id(each)], default=None)
    if model is None or not total or owned[id(model)] < MOST * total:
        return None
    marked, inside = _compiled(modules)
    names = {id(each) for _, each in modules_of(model)}
    chains = [_chain(each, wanted, MOST * total) for each in roots if owned[id(each)] >= MOST * total]
    called = {id(each): each for chain in chains for each in chain}
    return Ownership(
        model=model,
        callable=tuple(each for key, each in called.items() if key not in inside),
        compiled=any(id(each) in names for each in marked),
        trainer=next((each for each in trainers if id(read(each, "model")) in names), None),
        optimizers=tuple(optimizers),
    )


def only_trainer(living: LiveObjects) -> Any:
    trainers = _alive(living)[1]
    return trainers[0] if len(trainers) == 1 else None


def _alive(living: LiveObjects) -> tuple[list[nn.Module], list[Any], list[Optimizer]]:
    """Return live modules, Trainers and optimizers, by type: proxies lie about it."""
    modules, trainers = dict[int, nn.Module](), dict[int, Any]()
    optimizers: dict[int, Optimizer] = {}
    look = "transformers" in sys.modules
    for each in living:
        kind = type(each)
        if issubclass(kind, nn.Module):
            if "_modules" in state_of(each):
                modules[id(each)] = each
        elif issubclass(kind, Optimizer):
            if "param_groups" in state_of(each):
                optimizers[id(each)] = each
        elif look and kind.__name__.endswith("Trainer") and is_trainer(each):
            trainers[id(each)] = each
    return [*modules.values()], [*trainers.values()], [*optimizers.values()]


def _compiled(modules: list[nn.Module]) -> tuple[list[nn.Module], set[int]]:
    """Return the modules with a mark of torch.compile, and the ids of those below them."""
    marked = [each for each in modules if compile_mark(each, "") is not None]
    return marked, {id(below) for each in marked for _, below in modules_of(each) if below is not each}


def outside_compiled(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return a model's modules that compiled code does not run, and the compiled regions among them."""
    tree = [each for _, each in modules_of(model)]
    marked, inside = _compiled(tree)
    outside = [each for each in tree if id(each) not in inside]
    return outside, [each for each in marked if id(each) not in inside]


def _owned(root: nn.Module, wanted: dict[int, int]) -> int:
    mine = {
        id(parameter)
        for _, module in modules_of(root)
        for parameter in parameters_of(module).values()
        if id(parameter) in wanted
    }
    return sum(wanted[each] for each in mine)


def _chain(root: nn.Module, wanted: dict[int, int], least: float) -> list[nn.Module]:
    """Return the modules from a root inwards that own most."""
    found: list[nn.Module] = []
    inner: nn.Module | None = root
    while inner is not None:
        found.append(inner)
        below = children_of(inner).values()
        inner = next((each for each in below if each is not None and _owned(each, wanted) >= least), None)
    return found
