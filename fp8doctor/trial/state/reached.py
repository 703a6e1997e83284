"""What a user's function can reach by name: modules and optimizers in its closure, its globals and its
object, and in what these hold."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import state_of

DEPTH = 4
"""Functions, objects and containers that are followed from one to the next. A convention of this tool."""

MOST = 100
"""Elements of a container that are looked at: data sets are in reach too. A convention of this tool."""

CONTAINERS = (list, tuple, set, deque)


@dataclass
class Reached:
    """Modules and optimizers, each once."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def reached(*functions: Any) -> Reached:
    """Find what these functions name, and the functions that they name."""
    found, seen = Reached(), set[int]()
    for function in functions:
        _look(function, found, seen, DEPTH)
    return found


def _look(value: Any, found: Reached, seen: set[int], depth: int) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    kind = type(value)
    if issubclass(kind, nn.Module):
        found.modules.append(value)
    elif issubclass(kind, torch.optim.Optimizer):
        found.optimizers.append(value)
    elif depth:
        for each in _named(value):
            _look(each, found, seen, depth - 1)


def _named(value: Any) -> Iterator[Any]:
    """Find what a function names, and what an object or a container holds."""
    kind = type(value)
    if kind is MethodType:
        yield from (value.__func__, value.__self__)
    elif kind is functools.partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind is FunctionType:
        yield from (value.__globals__[name] for name in names_in(value.__code__) if name in value.__globals__)
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)())
    elif issubclass(kind, dict):
        yield from islice(dict.values(value), MOST)
    elif issubclass(kind, CONTAINERS):
        yield from islice(next(each for each in CONTAINERS if issubclass(kind, each)).__iter__(value), MOST)
    elif not issubclass(kind, (ModuleType, type, torch.Tensor)):
        yield from state_of(value).values()
