"""Find the model whose parameters an optimizer steps, and the modules to watch.

Objects hidden by ``gc.freeze()`` count: long trainings freeze before they fork workers or after their first
step.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from fp8doctor.examine.marks import compile_mark
from fp8doctor.loading.job import is_trainer
from fp8doctor.stacks.looking import (
    children_of,
    is_a,
    modules_of,
    parameters_in,
    parameters_of,
    read,
    read_class,
    state_of,
    written_back,
)
from fp8doctor.stacks.tensors import whole_size

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
    wrapper: Any
    """The wrapper of an optimizer that steps copies of the parameters, or None."""


class LiveObjects:
    """Finds live objects, and remembers those that it finds; keeps none alive."""

    def __init__(self) -> None:
        self._noted: dict[int, weakref.ref[Any]] = {}

    def note(self, objects: Iterable[Any]) -> None:
        """Remember objects for as long as other code holds them."""
        for each in objects:
            with contextlib.suppress(TypeError):
                self._noted[id(each)] = weakref.ref(each)

    def forget(self) -> None:
        self._noted.clear()

    def found(self) -> tuple[list[nn.Module], list[Any], list[Any]]:
        """Return modules, optimizers with their wrappers, and Trainers. One pass takes 0.1 to 0.3 s."""
        roles: dict[type, int | None] = {}
        found: tuple[dict[int, Any], ...] = ({}, {}, {})
        noted = [each for reference in self._noted.values() if (each := reference()) is not None]
        for each in chain(gc.get_objects(), noted):
            kind = type(each)
            if kind not in roles:
                roles[kind] = _role(kind)
            if (role := roles[kind]) is not None:
                found[role][id(each)] = each
        modules, optimizers, trainers = (list(each.values()) for each in found)
        modules = [each for each in modules if "_modules" in state_of(each)]
        self.note((*modules, *optimizers, *trainers))
        return modules, optimizers, trainers


def _role(kind: type) -> int | None:
    """Sort a class, not objects, which may be proxies."""
    if issubclass(kind, nn.Module):
        return 0
    if all(read_class(kind, name) is not None for name in ("step", "zero_grad")):
        return 1
    look = "transformers" in sys.modules and kind.__name__.endswith("Trainer")
    return 2 if look and is_trainer(kind) else None


def owner_of(optimizer: Optimizer, living: LiveObjects) -> Ownership | None:
    """Find the model that owns at least half of what an optimizer steps.

    The optimizer may step copies, or some of its parameters may have been replaced.
    """
    living.note([optimizer])
    modules, optimizers, trainers = living.found()
    below = {id(child) for module in modules for child in children_of(module).values()}
    roots = [each for each in modules if id(each) not in below]
    lost = all(each.grad is None for each in parameters_in(optimizer))  # then the model has the gradients
    trained = [each for m in modules if lost for each in parameters_of(m).values() if each.grad is not None]
    for parameters, wrapper in (*_trained_by(optimizer, optimizers), (trained, None)):
        wanted = {id(each): whole_size(each) for each in parameters}
        least = MOST * sum(wanted.values())
        if not least or not (owning := [each for each in roots if _owned(each, wanted) >= least]):
            continue
        model = max(owning, key=lambda each: _owned(each, wanted))
        marked, inside = _compiled(modules)
        names = {id(each) for _, each in modules_of(model)}
        called = {id(each): each for root in owning for each in _chain(root, wanted, least)}
        return Ownership(
            model=model,
            callable=tuple(each for key, each in called.items() if key not in inside),
            compiled=any(id(each) in names for each in marked),
            trainer=next((each for each in trainers if id(read(each, "model")) in names), None),
            optimizers=tuple(
                each for each in optimizers if is_a(each, Optimizer) and "param_groups" in state_of(each)
            ),
            wrapper=wrapper,
        )
    return None


def _trained_by(optimizer: Optimizer, optimizers: Iterable[Any]) -> Iterator[tuple[list[nn.Parameter], Any]]:
    """Yield parameters of the model, and the optimizer's wrapper."""
    stepped = [*parameters_in(optimizer)]
    yield stepped, None
    copies = {id(each) for each in stepped}
    for each in optimizers:
        if any(value is optimizer for value in state_of(each).values()):
            yield [parameter for parameter in written_back(each) if id(parameter) not in copies], each
    trained = [each for each in stepped if each.grad is not None]
    if 0 < len(trained) < len(stepped):
        yield trained, None


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
    mine = {id(each) for _, module in modules_of(root) for each in parameters_of(module).values()}
    return sum(size for key, size in wanted.items() if key in mine)


def _chain(root: nn.Module, wanted: dict[int, int], least: float) -> Iterator[nn.Module]:
    """Yield the modules from a root inwards that own most."""
    inner: nn.Module | None = root
    while inner is not None:
        yield inner
        below = children_of(inner).values()
        inner = next((each for each in below if each is not None and _owned(each, wanted) >= least), None)
