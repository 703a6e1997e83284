"""Read the user's objects, optimizers among them, without running the user's code.

``getattr`` runs properties, ``__getattr__`` and parametrizations, which may draw random numbers, write or
raise. This reads an object's dictionary, a module's members, and the class; a descriptor runs only if a
harmless library wrote it."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

_log = logging.getLogger(__name__)

LIBRARIES = frozenset(
    """
    accelerate builtins enum functools peft torch torchao transformer_engine transformer_engine_torch
    transformers
    """.split()
)
"""Packages whose properties only read. Properties of an ``nn.Module`` never run: ``parametrize`` is torch's
and calls the user's code."""

SLOTS = (GetSetDescriptorType, MemberDescriptorType)
BINDING = (FunctionType, staticmethod, classmethod)
"""Descriptors that return a method without running it."""

HELD = ("_parameters", "_buffers", "_modules")
"""Dictionaries behind ``nn.Module.__getattr__``."""

TENSOR = ("torch", "Tensor")

NOWHERE: Any = object()


def read(thing: Any, name: str, default: Any = None) -> Any:
    """Read an attribute; return ``default`` if only running code could."""
    if thing is None:
        return default
    kind = type(thing)
    if kind is FunctionType:  # final, so its getattr is safe
        return getattr(thing, name, default)
    owner, found = _on_class(kind, name)
    if found is not NOWHERE and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")):
        return _described(thing, owner, found, default)
    state = state_of(thing)
    if name in state:
        return state[name]
    if is_module(thing):
        for held in HELD:
            if name in (members := _members(thing, held)):
                return members[name]
    if found is not NOWHERE:
        return _described(thing, owner, found, default) if hasattr(type(found), "__get__") else found
    if kind is MethodType:
        return read(thing.__func__, name, default)
    return getattr(thing, name, default) if is_torchscript(kind) else default


def read_class(kind: type, name: str) -> Any:
    """Read a raw attribute of a class or its ancestors, or None."""
    found = _on_class(kind, name)[1]
    return None if found is NOWHERE else found


def state_of(thing: Any) -> dict[str, Any]:
    """Return an object's dictionary past its class's overrides; empty without one."""
    kind = type(thing)
    module, state_of_module = _module()
    if issubclass(kind, module):
        return state_of_module(thing)
    for each in reversed(kind.__mro__):
        slot: Any = each.__dict__.get("__dict__")
        if type(slot) in SLOTS:
            state = slot.__get__(thing)
            return state if isinstance(state, dict) else {}
    return {}


def is_a(thing: Any, kind: type | tuple[type, ...]) -> bool:
    """Tell if an object is of a class, past a computed ``__class__``."""
    return issubclass(type(thing), kind)


def is_module(thing: Any) -> bool:
    return issubclass(type(thing), _module()[0])


def acts_on_its_death(kind: type) -> bool:
    """Tell if ``__del__`` of the user's or of a library that is not known frees something with an object.

    The death of a copy would free it for the original too.
    """
    owner, _ = _on_class(kind, "__del__")
    return owner is not None and _package(owner) not in LIBRARIES | sys.stdlib_module_names


def is_torchscript(kind: type) -> bool:
    return ancestor(kind, "torch.jit.", ("ScriptModule",)) is not None


def _there(module: Module, held: str) -> dict[str, Any]:
    """Return the members of one kind that are not None."""
    return {name: each for name, each in _members(module, held).items() if each is not None}


def parameters_of(module: Module) -> dict[str, Parameter]:
    return _there(module, "_parameters")


def buffers_of(module: Module) -> dict[str, Tensor]:
    return _there(module, "_buffers")


def children_of(module: Module) -> dict[str, Module]:
    return _there(module, "_modules")


def modules_of(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield each module of a tree once, named and ordered as by ``named_modules``."""
    seen: set[int] = set()
    left = [("", root)]
    while left:
        name, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        left += [
            (f"{name}.{child}" if name else child, each)
            for child, each in reversed(children_of(module).items())
        ]


def tensors_of(root: Module, held: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a tree once: ``_parameters`` or ``_buffers``."""
    seen: set[int] = set()
    for name, module in modules_of(root):
        for key, tensor in _there(module, held).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{name}.{key}" if name else key), tensor


def tensor(module: Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer, or its original.

    FSDP1 keeps a plain tensor in the module's dictionary; the old ``spectral_norm`` and ``weight_norm`` keep
    another parameter. A parametrization keeps the original, or parts of it: the largest has the whole's
    shape.
    """
    own = buffers_of(module) | parameters_of(module)
    for key in (name, f"{name}_orig", f"{name}_v"):
        if key in own:
            return own[key]
    kept = state_of(module).get(name)
    if kept is not None and TENSOR in lineage(type(kept)):
        return cast("Tensor", kept)
    registered = children_of(module).get("parametrizations")
    parametrization = None if registered is None else children_of(registered).get(name)
    if parametrization is None:
        return None
    parts = {**parameters_of(parametrization), **buffers_of(parametrization)}
    originals = [part for key, part in parts.items() if key.startswith("original")]
    return max(originals, key=lambda part: part.numel(), default=None)


def forward_of(module: Any) -> Any:
    """Return the forward that a call of the module runs."""
    return state_of(module).get("forward", read_class(type(module), "forward"))


def held_by(function: Any, name: str) -> Any:
    """Return the value of a variable that a function or method closes over, or None."""
    function = read(function, "__func__", function)
    names = getattr(read(function, "__code__"), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


@functools.cache
def _module() -> tuple[type, Callable[[Any], dict[str, Any]]]:
    """Return ``nn.Module`` and the getter of its instances' dictionaries."""
    from torch.nn import Module

    slot: Any = Module.__dict__["__dict__"]
    return Module, slot.__get__


def _on_class(kind: type, name: str) -> tuple[type | None, Any]:
    for each in kind.__mro__:
        if name in each.__dict__:
            return each, each.__dict__[name]
    return None, NOWHERE


def _described(thing: Any, owner: type | None, found: Any, default: Any) -> Any:
    """Run a descriptor if it is a slot, a method, or a library's."""
    harmless = type(found) in SLOTS + BINDING or (
        owner is not None and _package(owner) in LIBRARIES and not is_module(thing)
    )
    if not harmless:
        return default
    try:
        return found.__get__(thing, type(thing))
    except Exception:  # a slot that is empty, a library's property over a user's values
        _log.debug("an attribute cannot be read", exc_info=True)
        return default


def _members(module: Any, held: str) -> dict[str, Any]:
    """Return a module's members of one kind, past overrides of its containers."""
    state = state_of(module)
    found = state.get(held)
    if type(found) is dict:
        return found
    if isinstance(found, dict):
        return dict(dict.items(found))
    if is_torchscript(type(module)):
        inner = state.get("_actual_script_module")
        return (
            _members(inner, held) if inner is not None else dict(found.items() if found is not None else ())
        )
    return {}


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


Ancestor = tuple[str, str]
"""Module and qualified name of a class: ``("torch.nn.modules.linear", "Linear")``."""

_KNOWN: WeakKeyDictionary[type, tuple[Ancestor, ...]] = WeakKeyDictionary()
"""Cache of lineages; keeps no class alive."""


def lineage(kind: type) -> tuple[Ancestor, ...]:
    """List module and qualified name of a class and its ancestors.

    Leaves out FSDP2's class in front (``FSDPLinear``) and its mixin. The module is empty for a class without
    one.
    """
    known = _KNOWN.get(kind)
    if known is None:
        mro = kind.__mro__
        if len(mro) > 2 and mro[1].__name__ == "FSDPModule":
            mro = mro[2:]
        known = tuple((str(each.__module__ or ""), each.__qualname__) for each in mro)
        _KNOWN[kind] = known
    return known


def ancestor(kind: type, module_prefix: str, names: tuple[str, ...]) -> str | None:
    """Name the first class of the lineage among ``names`` under ``module_prefix``."""
    for module, name in lineage(kind):
        if name in names and module.startswith(module_prefix):
            return f"{module}.{name}"
    return None


def home(kind: type) -> str:
    """Return the module of a class, past FSDP2's."""
    return lineage(kind)[0][0]


def class_name(kind: type) -> str:
    """Return the qualified name of a class, past FSDP2's."""
    module, name = lineage(kind)[0]
    return f"{module}.{name}"


def parameters_in(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper, with the same groups."""
    of_accelerate = ancestor(type(optimizer), "accelerate.", ("AcceleratedOptimizer",))
    return state_of(optimizer).get("optimizer", optimizer) if of_accelerate else optimizer


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers, which may hold parameter copies."""
    inner = optimizer
    while inner is not None:
        optimizer, state = inner, state_of(inner)
        inner = state.get("optimizer", state.get("_optimizer"))  # the second is Lightning's
    return optimizer


def written_back(wrapper: Any) -> list[Parameter]:
    """Return a wrapper's own parameters, which it updates from the stepped copies.

    DeepSpeed 0.19.8 keeps them in lists by group, or by part of one, with ZeRO (stages 1 to 3) and without.
    """
    from torch.nn import Parameter

    held = list(state_of(wrapper).values())
    for _ in range(3):
        held = [inner for each in held for inner in (each if type(each) in (list, tuple) else (each,))]
    return list({id(each): each for each in held if is_a(each, Parameter)}.values())
