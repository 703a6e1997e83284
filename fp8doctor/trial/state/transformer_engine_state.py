"""Transformer Engine's process-wide FP8 state, where it is loaded: read, put back, and kept from replicas.

The one place that reads what ``FP8GlobalStateManager`` holds: class attributes up to 2.14, the dataclass
``quantization_state`` from 2.15 on (sources at v1.0, v2.2 and main of November 2026). Leaving a
``te.autocast``, whatever its recipe, updates the scales of every module that ever registered in the global
buffers for delayed scaling (``reduce_and_update_fp8_tensors``, the same in the source of August 2026), and so
does the backward. So the user's own are out of reach while replicas run, and every replica that is timed has
buffers of its own: the modules of one arm would be updated in the steps of all others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fp8doctor.stacks.transformer_engine import autocast_is_open, autocast_with, state_manager

BUFFERS = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
"""Dicts of lists of tensors, by autocast."""


def read() -> dict[str, Any]:
    """Copy every plain attribute of the state, lists and dicts two levels deep."""
    return {name: _copied(value) for name, value in _attributes(_state())}


def write(before: dict[str, Any]) -> None:
    """Put back what differs, into the same containers."""
    state = _state()
    for name, value in _attributes(state):
        if name not in before or _same(value, before[name]):
            continue
        if isinstance(value, dict) and isinstance(before[name], dict):
            value.clear()
            value.update(_copied(before[name]))
        elif isinstance(value, list) and isinstance(before[name], list):
            value[:] = _copied(before[name])
        else:
            setattr(state, name, before[name])


SETTINGS = (("FP8 state of Transformer Engine", read, write),)


Buffers = dict[str, dict[str, Any]]
"""Name of a global buffer -> what stands in its place for some replicas alone."""


@contextmanager
def buffers_apart(own: Buffers | None = None) -> Iterator[None]:
    """Have other global buffers inside, and put the very same ones back afterwards.

    They are those in ``own``, which is filled with empty ones where it lacks one; without it they are empty.
    """
    state, own = _state(), {} if own is None else own
    kept = {name: getattr(state, name) for name in BUFFERS if isinstance(getattr(state, name, None), dict)}
    for name in kept:
        setattr(state, name, own.setdefault(name, {}))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(state, name, value)


def open_autocast() -> Callable[[], AbstractContextManager[object]]:
    """Return what opens the autocast that is open now once more; a context without effect where none is."""
    return partial(autocast_with, state_manager().get_fp8_recipe()) if autocast_is_open() else nullcontext


ENTERS = ("autocast_enter", "fp8_autocast_enter")
"""What an autocast calls of the manager when it is opened: from 2.9 on, and before. Recipe and the switch are
its third and first arguments in 1.0 to 2.20."""

EXITS = ("autocast_exit", "fp8_autocast_exit")
"""What it calls when it is closed, in the same versions."""


def opened_with(recipe: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which every FP8 autocast that is opened gets this recipe in the place of its own.

    The library's own test of a recipe is made of the one that is given. What stands in the place of the
    library's function is one and the same each time, so that a graph that calls it is compiled once.
    """
    manager = state_manager()
    name = next((each for each in ENTERS if each in vars(manager or type)), None)
    if name is None:
        return nullcontext
    own = vars(manager)[name]
    supported = getattr(sys.modules[manager.__module__], "check_recipe_support", None)

    def enter(
        cls: Any, /, enabled: bool = False, calibrating: bool = False, fp8_recipe: Any = None, **more: Any
    ) -> None:
        if enabled and supported is not None:
            supported(recipe)
        own.__func__(cls, enabled, calibrating, recipe if enabled else fp8_recipe, **more)

    given = classmethod(enter)

    @contextmanager
    def instead() -> Iterator[None]:
        setattr(manager, name, given)
        try:
            yield
        finally:
            setattr(manager, name, own)

    return instead


def _state() -> Any:
    """Find what holds the state: an instance, or the manager itself; None where the library is not loaded."""
    manager = state_manager()
    return getattr(manager, "quantization_state", manager)


def _attributes(state: Any) -> list[tuple[str, Any]]:
    names = getattr(type(state), "__slots__", None) or list(getattr(state, "__dict__", ()))
    pairs = [(name, getattr(state, name, None)) for name in names if not name.startswith("_")]
    return [
        (name, value)
        for name, value in pairs
        if not callable(value) and not isinstance(value, (classmethod, staticmethod))
    ]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: list(each) if isinstance(each, list) else each for key, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _same(a: Any, b: Any) -> bool:
    """Whether two values are made of the very same objects; tensors are not compared by value."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b
