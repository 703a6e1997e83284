"""The user's modules, tensors and optimizers: found, noted before a trial, and put back if they changed."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import innermost, is_a, is_module, parameters_in, state_of

_log = logging.getLogger("fp8doctor")

MODEL, OPTIMIZER = "the model (put back)", "the settings of the optimizer (put back)"
"""What a report names."""

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that hold its hooks; None before the first one (torch 2.13)."""

Contents = dict[Any, tuple[Any, Any]]
"""Attribute -> its value, and a copy of the value if it is a container."""

PutBack = Callable[[], str | None]
"""Puts one thing back; returns its name if it had changed and belongs to the model."""


def put_back(noted: Iterable[PutBack]) -> list[str]:
    """Put everything back, and name what had changed. If one part fails, the others are put back."""
    changed: dict[str, None] = {}
    for each in noted:
        try:
            if name := each():
                changed[name] = None
        except Exception:  # from a user's or a library's class, or of a setting that this torch lacks
            _log.debug("%s", each, exc_info=True)
    return list(changed)


def noted_objects(job: Job) -> list[PutBack]:
    """Note the user's modules, tensors and optimizers."""
    roots, optimizers, trained = of_the_job(job)
    modules = _each_once(each for root in roots for each in root.modules())
    held = [(*module._parameters.values(), *module._buffers.values()) for module in modules]
    tensors = _each_once(chain(*held, trained))
    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return [
        *map(_noted_tensor, gradients),  # first: of a weight's dtype
        *map(_noted_tensor, tensors),
        *(partial(_put_back, vars(module), contents(vars(module)), MODEL) for module in modules),
        *(partial(_put_back, held, contents(held), OPTIMIZER) for each in optimizers for held in _held(each)),
    ]


def _noted_tensor(tensor: torch.Tensor) -> PutBack:
    """Note its data, its gradient, its hooks, and the attributes that the user or a library set.

    Torch cannot tell whether data moved in quantized and nested tensors.
    """
    data, before = None, contents(_attributes(tensor))
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if plain and not tensor.is_meta:
        with suppress(NotImplementedError, RuntimeError):
            data = tensor.detach() if tensor.is_set_to(tensor.detach()) else None

    def put_back() -> str | None:
        moved = False
        if data is not None and (tensor.dtype != data.dtype or not tensor.is_set_to(data)):
            tensor.data, moved = data, True
        attributes = _attributes(tensor)
        cleared = {"grad"} if attributes.get("grad") is None else set()  # which is no change
        for name in HOOKS:
            if attributes[name] and attributes[name] is not before[name][0]:
                attributes[name].clear()  # autograd holds on to it
        changed = restore(attributes, before)
        for name in changed:
            setattr(tensor, name, attributes[name]) if name in attributes else delattr(tensor, name)
        return MODEL if moved or {*changed} - cleared else None

    return put_back


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    names = ("grad", "requires_grad", *HOOKS) if tensor.is_leaf else HOOKS
    return {**getattr(tensor, "__dict__", {}), **{name: getattr(tensor, name) for name in names}}


def _held(optimizer: Any) -> list[dict[Any, Any]]:
    """List the dictionaries of an optimizer or a scheduler. A tensor in one is left to the guard."""
    places = (getattr(optimizer, "__dict__", None), getattr(optimizer, "state", None))
    held = [place for place in places if isinstance(place, dict)]
    return [*held, *getattr(optimizer, "param_groups", ())]


def _put_back(held: dict[Any, Any], before: Contents, called: str) -> str | None:
    return called if restore(held, before) else None


def contents(attributes: Mapping[Any, Any]) -> Contents:
    """Note attributes, with copies of those that are containers."""
    noted: Contents = {}
    for name, value in attributes.items():
        kind = next((kind for kind in (dict, list, set, deque) if isinstance(value, kind)), None)
        noted[name] = value, kind(value) if kind else None
    return noted


def restore(attributes: dict[Any, Any], before: Contents) -> list[Any]:
    """Put back every attribute and every container's contents; name those that had changed."""
    changed = [name for name in attributes if name not in before]
    for name in changed:
        del attributes[name]
    for name, (value, held) in before.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value
            changed.append(name)
        if held is not None and _ids(value) != _ids(held):
            value.clear()
            value.extend(held) if isinstance(value, (list, deque)) else value.update(held)
            changed.append(name)
    return changed


def _ids(container: Any) -> list[int]:
    """Tell which objects a container holds, in their order; a set has none."""
    ids = [*map(id, container), *map(id, container.values() if isinstance(container, dict) else ())]
    return sorted(ids) if isinstance(container, set) else ids


DEPTH = 4
"""Functions, objects and containers that are followed from one to the next. A choice."""

MOST = 100
"""Elements of a container that are looked at: it may be a data set. A choice."""

CONTAINERS = (list, tuple, set, deque)


def of_the_job(job: Job) -> tuple[list[nn.Module], list[Any], list[torch.Tensor]]:
    """Find the user's modules, optimizers with schedulers, and trained tensors.

    That is the job's, and what its loss and step can reach by name.
    """
    job = job.sharded or job
    found: list[Any] = []
    seen = set[int]()
    for function in (job.loss, job.training_step):
        _look(function, found, seen, DEPTH)
    modules = [job.model, *(each for each in found if is_module(each))]
    optimizers = [job.optimizer, *job.other_optimizers]
    optimizers += [each for each in found if is_a(each, Optimizer) or is_a(each, LRScheduler)]
    # Accelerate's wrapper holds the optimizer, and so does a scheduler.
    optimizers = [each if is_a(each, LRScheduler) else innermost(each) for each in optimizers]
    attributes = [vars(each) for module in modules for each in module.modules()]
    tensors = chain(found, *map(parameters_in, optimizers), *(attribute.values() for attribute in attributes))
    trained = [each for each in tensors if is_a(each, torch.Tensor) and each.requires_grad]
    return _each_once(modules), _each_once(optimizers), _each_once(trained)


def _each_once(values: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in values if each is not None}.values())


def _look(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if issubclass(type(value), (nn.Module, Optimizer, LRScheduler, torch.Tensor)):
        found.append(value)
    if depth and not issubclass(type(value), (nn.Module, Optimizer, torch.Tensor)):
        for each in _named(value):
            _look(each, found, seen, depth - 1)


def _named(value: Any) -> Iterator[Any]:
    """Yield the objects that a function names, or that an object or a container holds."""
    kind = type(value)
    if kind is MethodType:
        yield from (value.__func__, value.__self__)
    elif kind is partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind is FunctionType:
        yield from (value.__globals__[name] for name in names_in(value.__code__) if name in value.__globals__)
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)())
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif issubclass(kind, dict):
        yield from islice(dict.values(value), MOST)
    elif issubclass(kind, CONTAINERS):
        yield from islice(next(each for each in CONTAINERS if issubclass(kind, each)).__iter__(value), MOST)
    elif not issubclass(kind, (ModuleType, type)):
        yield from state_of(value).values()
