"""The user's modules, tensors and optimizers: found, noted before a trial, and put back if they changed.

A trial needs none of these changes, but a training step that names the user's objects may make them. Nothing
is taken away during the trial, so an interrupt loses nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import is_a, is_module, state_of
from fp8doctor.trial.state.process_settings import alike

_log = logging.getLogger("fp8doctor")

NAMES = {
    "training": "training flags",
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "modules",
    "_non_persistent_buffers_set": "buffers",
}
"""Attribute of a module -> its name in a report; any other is a hook or an attribute."""

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that hold its hooks; None before the first one (torch 2.13)."""

Contents = dict[Any, tuple[Any, Any]]
"""Attribute -> its value, and a copy of the value if it is a container."""


class UserObjects:
    """The user's modules and tensors as they were when this was made."""

    def __init__(self, users: UsersOwn) -> None:
        self._modules = [
            (module, type(module), contents(vars(module)))
            for root in users.modules
            for module in root.modules()
        ]
        found = [
            tensor
            for module, _, _ in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        found += users.trained
        tensors = {id(tensor): tensor for tensor in found}.values()
        self._tensors = [(tensor, tensor.requires_grad, contents(_attributes(tensor))) for tensor in tensors]
        self._gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        places = [("parameters", tensor) for tensor in tensors]
        places += [("gradients", gradient) for _, gradient in self._gradients if gradient is not None]
        self._data = [(each, name, data) for name, each in places if (data := _data_of(each)) is not None]

    def put_back(self) -> list[str]:
        """Put everything back, and name what had changed. If one part fails, the others are put back."""
        changed: dict[str, None] = {}
        parts: tuple[tuple[Callable[..., Iterable[str]], Iterable[tuple[Any, ...]]], ...] = (
            (_put_data_back, self._data),  # before the gradients, which need the same dtype
            (_put_gradient_back, self._gradients),
            (_put_module_back, self._modules),
            (_put_attributes_back, self._tensors),
        )
        for put_back, items in parts:
            for item in items:
                try:
                    changed.update(dict.fromkeys(put_back(*item)))
                except Exception:  # from a user's or a library's class
                    _log.debug("%s of %s", put_back.__name__, type(item[0]), exc_info=True)
        return list(changed)


def _put_gradient_back(tensor: torch.Tensor, gradient: torch.Tensor | None) -> list[str]:
    """Put the same gradient object back; clearing it is no change."""
    found = tensor.grad
    if found is not gradient:
        tensor.grad = gradient
    return [] if found is gradient or found is None else ["gradients"]


def _put_module_back(module: nn.Module, kind: type, held: Contents) -> list[str]:
    changed = [] if type(module) is kind else ["modules"]
    if changed:
        module.__class__ = kind
    names = restore(vars(module), held)
    return changed + [NAMES.get(name, "hooks" if "hooks" in name else "modules") for name in names]


def _put_data_back(tensor: torch.Tensor, name: str, data: torch.Tensor) -> list[str]:
    if tensor.dtype == data.dtype and tensor.is_set_to(data):
        return []
    tensor.data = data
    return [name]


def _put_attributes_back(tensor: torch.Tensor, requires_grad: bool, held: Contents) -> list[str]:
    changed = []
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        changed.append("requires_grad")
        tensor.requires_grad_(requires_grad)
    attributes = _attributes(tensor)
    for name in HOOKS:
        if attributes[name] and attributes[name] is not held[name][0]:
            attributes[name].clear()  # autograd holds on to it
    for name in restore(attributes, held):
        changed.append("hooks" if "hooks" in name else "attributes of parameters")
        setattr(tensor, name, attributes[name]) if name in attributes else delattr(tensor, name)
    return changed


def _data_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the data that ``.data = ...`` can put back.

    None if torch cannot tell whether it moved, as for quantized and nested tensors.
    """
    if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
        with suppress(NotImplementedError, RuntimeError):
            data = tensor.detach()
            if tensor.layout is torch.strided and tensor.is_set_to(data):
                return data
    return None


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Collect a tensor's hooks and the attributes that the user or a library set."""
    return {**getattr(tensor, "__dict__", {}), **{name: getattr(tensor, name) for name in HOOKS}}


def contents(attributes: Mapping[Any, Any]) -> Contents:
    """Note attributes, with copies of those that are containers."""
    return {name: (value, _copied(value)) for name, value in attributes.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    kind = next((kind for kind in (dict, list, set, deque) if isinstance(value, kind)), None)
    return kind(value) if kind else None


def restore(attributes: dict[Any, Any], before: Contents) -> list[str]:
    """Put back every attribute and every container's contents; name those that had changed."""
    changed = [name for name in attributes if name not in before]
    for name in changed:
        del attributes[name]
    for name, (value, held) in before.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value
            changed.append(name)
        if held is not None and not same(value, held):
            _refill(value, held)
            changed.append(name)
    return changed


def _refill(value: Any, held: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(held)
        return
    value.clear()
    value.extend(held) if isinstance(value, (list, deque)) else value.update(held)


def same(a: Any, b: Any) -> bool:
    """Return whether a generator is in a state, or two containers hold the same objects in the same order."""
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b)
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(x is y and a[x] is b[y] for x, y in zip(a, b, strict=True))
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """List the settings of an optimizer's groups, without their parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in getattr(optimizer, "param_groups", ())
    ]


class OptimizerSettings:
    """Optimizers and their groups as they were when this was made.

    A tensor in them is left to the guard of its storage.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        optimizers = list(optimizers)
        own = [each.__dict__ for each in optimizers if hasattr(each, "__dict__")]
        states = [each.state for each in optimizers if isinstance(getattr(each, "state", None), dict)]
        self._held = [(held, contents(held)) for held in (*own, *states)]
        self._groups = [
            (group, {name: value for name, value in group.items() if not _is_held(name, value)})
            for optimizer in optimizers
            for group in getattr(optimizer, "param_groups", ())
        ]
        self._trained = [(group, group["params"], list(group["params"])) for group, _ in self._groups]

    def put_back(self) -> list[str]:
        """Put everything back, and name what had changed."""
        changed: dict[str, None] = {}
        for held, before in self._held:
            changed.update(
                (name if isinstance(name, str) else "state", None) for name in restore(held, before)
            )
        for group, before in self._groups:
            for name in [each for each in group if each not in before and not _is_held(each, group[each])]:
                del group[name]
                changed[name] = None
            for name, value in before.items():
                if name not in group or not alike(group[name], value):
                    group[name] = value
                    changed[name] = None
        for group, parameters, trained in self._trained:
            if group["params"] is not parameters or not same(parameters, trained):
                group["params"], parameters[:] = parameters, trained
                changed["params"] = None
        return [repr(name) for name in changed]


def _is_held(name: str, value: Any) -> bool:
    return name == "params" or isinstance(value, torch.Tensor)


DEPTH = 4
"""Functions, objects and containers that are followed from one to the next. A choice."""

MOST = 100
"""Elements of a container that are looked at: it may be a data set. A choice."""

CONTAINERS = (list, tuple, set, deque)


class UsersOwn(NamedTuple):
    """The job's own objects, and those that its loss and step can reach by name; each once."""

    modules: list[nn.Module]
    """The job's model first."""
    optimizers: list[Any]
    trained: list[torch.Tensor]
    """Tensors with gradients that are in an optimizer, a variable or an attribute."""


def of_the_job(job: Job) -> UsersOwn:
    """Find the user's modules, optimizers and trained tensors."""
    job = job.sharded or job
    found: list[Any] = []
    seen = set[int]()
    for function in (job.loss, job.training_step):
        _look(function, found, seen, DEPTH)
    modules = [job.model, *(each for each in found if is_module(each))]
    optimizers = [job.optimizer, *job.other_optimizers, *(each for each in found if is_a(each, Optimizer))]
    optimizers = [inner(each) for each in optimizers if each is not None]
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    attributes = [vars(each) for module in modules for each in module.modules()]
    tensors = chain(
        found, *(group["params"] for group in groups), *(attribute.values() for attribute in attributes)
    )
    trained = [each for each in tensors if is_a(each, torch.Tensor) and each.requires_grad]
    return UsersOwn(_each_once(modules), _each_once(optimizers), _each_once(trained))


def _each_once(values: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in values}.values())


def _look(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if issubclass(type(value), (nn.Module, Optimizer, torch.Tensor)):
        found.append(value)
    elif depth:
        for each in _named(value):
            _look(each, found, seen, depth - 1)


def _named(value: Any) -> Iterator[Any]:
    """Yield the objects that a function names, or that an object or a container holds."""
    kind = type(value)
    if kind is MethodType:
        yield from (value.__func__, value.__self__)
    elif kind is functools.partial:
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
