"""State of torch.compile and Transformer Engine in this process: read, put back, and kept from replicas.

torch.compile: settings, counters, and its entries for the user's code. Settings that this torch
keeps elsewhere are left out.

Transformer Engine: whenever an autocast closes, or its backward ends, the library updates the scales of every
module that ever registered in its global buffers for delayed scaling. So replicas run with other buffers than
the user's, and each timed replica has its own: otherwise every variant's step would update all modules.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from fp8doctor.stacks import te_private, torch_private
from fp8doctor.stacks.te_private import autocast_is_open
from fp8doctor.stacks.torch_private import Unknown, compiled_entries
from fp8doctor.stacks.transformer_engine import autocast_with


def _read_counters() -> dict[str, dict[str, int]]:
    return {key: dict(value) for key, value in _counters().items()}


def _write_counters(value: dict[str, dict[str, int]]) -> None:
    counters = _counters()
    counters.clear()
    for key, counted in value.items():
        counters[key].update(counted)


def _counters() -> Any:
    return _known(torch_private.all_counters())


def _read_metrics() -> list[Any]:
    return list(_known(torch_private.compilation_metrics()))


def _write_metrics(value: list[Any]) -> None:
    metrics = _known(torch_private.compilation_metrics())
    metrics.clear()
    metrics.extend(value)


def _known(found: Any) -> Any:
    """Return what was found. Raises `Unknown` for None, so the setting is left out."""
    if found is None:
        raise Unknown("Dynamo is not loaded, or keeps this elsewhere")
    return found


def _read_configs() -> dict[str, dict[str, Any]]:
    return {
        name: sys.modules[name].get_config_copy() for name in torch_private.CONFIGS if name in sys.modules
    }


def _write_configs(before: dict[str, dict[str, Any]]) -> None:
    for name, values in before.items():
        config: Any = sys.modules[name]
        now = config.get_config_copy()
        for key, value in values.items():
            if now.get(key) != value:
                setattr(config, key, value)


class Entries:
    """Dynamo's compiled entries for the user's code objects, read when this is made."""

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self._before = [(code, compiled_entries(code)) for code in _codes(model, functions)]

    def put_back(self) -> bool:
        """Forget entries of code that had none; return whether all is as it was.

        Single entries cannot be removed: a new one next to the user's own stays.
        """
        for code, entries in self._before:
            if entries == [] and compiled_entries(code):
                torch_private.reset_code(code)
        return all(
            before is not None and now is not None and set(map(id, before)) == set(map(id, now))
            for before, now in ((entries, compiled_entries(code)) for code, entries in self._before)
        )


def _codes(model: nn.Module, functions: Iterable[Any]) -> list[types.CodeType]:
    """List the code of the model's classes, of the modules that define them, and of the user's functions."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    places = {
        each.__module__
        for each in (*classes, *functions)
        if isinstance(getattr(each, "__module__", None), str)
    }
    holders = [
        *classes,
        *(sys.modules[name] for name in places if name in sys.modules and not name.startswith("torch.")),
    ]
    values = [*functions, *(value for holder in holders for value in list(vars(holder).values()))]
    found = (code for value in values for code in _nested(getattr(value, "__code__", None)))
    return list({id(code): code for code in found}.values())


def _nested(code: Any) -> Iterator[types.CodeType]:
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            yield from _nested(constant)


def monitor_of_bars() -> Any:
    """Return the thread that tqdm keeps running once torch.compile has shown a bar, if there is one."""
    return getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "monitor", None)


def stop_monitor_of_bars() -> None:
    """End that thread; tqdm starts it again if it needs it."""
    if monitor_of_bars() is not None:
        monitor_of_bars().exit()
        sys.modules["tqdm"].tqdm.monitor = None


def _read_te() -> dict[str, Any]:
    """Copy every plain attribute of Transformer Engine's state, lists and dicts two levels deep."""
    return {name: _copied_two_levels(value) for name, value in _attributes(te_private.state())}


def _write_te(before: dict[str, Any]) -> None:
    """Put attributes that differ back, into the same containers."""
    state = te_private.state()
    for name, value in _attributes(state):
        if name not in before or _same_objects(value, before[name]):
            continue
        if isinstance(value, dict) and isinstance(before[name], dict):
            value.clear()
            value.update(_copied_two_levels(before[name]))
        elif isinstance(value, list) and isinstance(before[name], list):
            value[:] = _copied_two_levels(before[name])
        else:
            setattr(state, name, before[name])


SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("counters of torch.compile", _read_counters, _write_counters),
    ("metrics of torch.compile", _read_metrics, _write_metrics),
    ("settings of torch.compile", _read_configs, _write_configs),
    ("stance of torch.compile", lambda: _known(torch_private.stance()), torch_private.set_stance),
    ("FP8 state of Transformer Engine", _read_te, _write_te),
)
"""Name, how to read and how to write."""

Buffers = dict[str, dict[str, Any]]
"""Name of a global buffer -> its replacement for some replicas."""


@contextmanager
def buffers_apart(own: Buffers | None = None) -> Iterator[None]:
    """Use other global buffers inside, and put the user's own back afterwards.

    They come from ``own``, which gets an empty one for each that it lacks; without it all are empty.
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
    """Return a context that opens the current autocast again, or an empty one if none is open."""
    return partial(autocast_with, te_private.open_recipe()) if autocast_is_open() else nullcontext


def opened_with(recipe: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which every FP8 autocast opens with this recipe instead of its own.

    The library tests whether it supports the given recipe. The replacement is one function, so a graph that
    calls it is compiled once.
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


def _copied_two_levels(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: list(each) if isinstance(each, list) else each for key, each in value.items()}
    return list(value) if isinstance(value, list) else value


def _same_objects(a: Any, b: Any) -> bool:
    """Return whether two values consist of the very same objects; tensors are not compared by value."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_objects(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_objects, a, b))
    return a is b
