"""Transformer Engine's process-wide FP8 state, where it is loaded: read, put back, and kept from replicas.

Leaving a ``te.autocast``, whatever its recipe, updates the scales of every module that ever registered in the
global buffers for delayed scaling (``reduce_and_update_fp8_tensors``), and so does the backward. So the
user's own are out of reach while replicas run, and every replica that is timed has
buffers of its own: the modules of one arm would be updated in the steps of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fp8doctor.stacks import te_private
from fp8doctor.stacks.te_private import autocast_is_open
from fp8doctor.stacks.torch_private import Unknown
from fp8doctor.stacks.transformer_engine import autocast_with


def read() -> dict[str, Any]:
    """Copy every plain attribute of the state, lists and dicts two levels deep."""
    return {name: _copied(value) for name, value in _attributes(te_private.state())}


def write(before: dict[str, Any]) -> None:
    """Put back what differs, into the same containers."""
    state = te_private.state()
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
    state, own = te_private.state(), {} if own is None else own
    kept = {
        name: getattr(state, name)
        for name in te_private.BUFFERS
        if isinstance(getattr(state, name, None), dict)
    }
    for name in kept:
        setattr(state, name, own.setdefault(name, {}))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(state, name, value)


def open_autocast() -> Callable[[], AbstractContextManager[object]]:
    """Return what opens the autocast that is open now once more; a context without effect where none is."""
    return partial(autocast_with, te_private.open_recipe()) if autocast_is_open() else nullcontext


def opened_with(recipe: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which every FP8 autocast that is opened gets this recipe in the place of its own.

    The library's own test of a recipe is made of the one that is given. What stands in the place of the
    library's function is one and the same each time, so that a graph that calls it is compiled once.
    """
    manager = te_private.state_manager()
    if manager is None:
        return nullcontext
    if not (names := te_private.own_names(te_private.ENTERS)):
        raise Unknown("Transformer Engine opens its autocast in another way")
    name, supported = names[0], te_private.recipe_test()
    own = vars(manager)[name]

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
