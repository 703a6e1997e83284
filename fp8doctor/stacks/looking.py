"""Attributes of the user's objects, read without running the user's code.

``getattr`` runs properties, ``__getattr__`` and parametrizations, each of which may draw random numbers,
write to buffers or raise. What is read here lies in an object's own dictionary, in a module's parameters,
buffers and children, or in its class. A descriptor runs only when a library that does no harm wrote it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, cast

from fp8doctor.stacks.lineage import ancestor, lineage

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

_log = logging.getLogger(__name__)

LIBRARIES = frozenset(
    (
        "accelerate",
        "builtins",
        "enum",
        "functools",
        "peft",
        "torch",
        "torchao",
        "transformer_engine",
        "transformer_engine_torch",
        "transformers",
    )
)
"""Packages whose properties only read. Those of an ``nn.Module`` run for none of them: ``parametrize`` is
torch's, and calls what the user registered."""

SLOTS = (GetSetDescriptorType, MemberDescriptorType)
BINDING = (FunctionType, staticmethod, classmethod)
"""Descriptors that hand out a method and run none."""

HELD = ("_parameters", "_buffers", "_modules")
"""Where an ``nn.Module`` keeps what ``nn.Module.__getattr__`` finds."""

TENSOR = ("torch", "Tensor")

NOWHERE: Any = object()


def read(thing: Any, name: str, default: Any = None) -> Any:
    """Read an attribute as it lies in ``thing`` or its class; ``default`` where only running code would
    tell."""
    if thing is None:
        return default
    kind = type(thing)
    if kind is FunctionType:  # no class derives from it, so that nobody's code answers for it
        return getattr(thing, name, default)
    of_module = is_module(thing)
    if not of_module:
        name = _renamed(kind, name)
    owner, found = _on_class(kind, name)
    if found is not NOWHERE and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")):
        return _described(thing, owner, found, default)
    state = state_of(thing)
    if name in state:
        return state[name]
    if of_module:
        for held in HELD:
            if name in (members := _members(thing, held)):
                return members[name]
    if found is not NOWHERE:
        return _described(thing, owner, found, default) if hasattr(type(found), "__get__") else found
    if kind is MethodType:
        return read(thing.__func__, name, default)
    return getattr(thing, name, default) if is_torchscript(kind) else default


def read_class(kind: type, name: str) -> Any:
    """Read an attribute as it lies in a class or one that it derives from, descriptors unopened; None without
    one."""
    found = _on_class(kind, name)[1]
    return None if found is NOWHERE else found


def state_of(thing: Any) -> dict[str, Any]:
    """Read the dictionary of an object, whatever its class puts in the way; empty where it has none."""
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


def is_a(thing: Any, kind: type) -> bool:
    """Whether an object is of a class; ``isinstance`` would ask a ``__class__`` that may be computed."""
    return issubclass(type(thing), kind)


def is_module(thing: Any) -> bool:
    """Whether this is an ``nn.Module``."""
    return issubclass(type(thing), _module()[0])


def is_torchscript(kind: type) -> bool:
    """Whether ``torch.jit`` made the modules of this class."""
    return ancestor(kind, "torch.jit.", ("ScriptModule",)) is not None


def parameters_of(module: Module) -> dict[str, Parameter | None]:
    """Read the parameters of this very module."""
    return _members(module, "_parameters")


def buffers_of(module: Module) -> dict[str, Tensor | None]:
    """Read the buffers of this very module."""
    return _members(module, "_buffers")


def children_of(module: Module) -> dict[str, Module | None]:
    """Read the modules right below this one."""
    return _members(module, "_modules")


def modules_of(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield every module of a tree once, with its name, in the order of ``named_modules``."""
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
            if each is not None
        ]


def tensors_of(root: Module, held: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a tree that its modules keep in ``held`` (``_parameters``, ``_buffers``),
    once."""
    seen: set[int] = set()
    for name, module in modules_of(root):
        for key, tensor in _members(module, held).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{name}.{key}" if name else key), tensor


def tensor(module: Module, name: str) -> Tensor | None:
    """Return a parameter or buffer of this very module, or what stands for it.

    FSDP1 keeps a plain tensor in the module's dictionary, the old ``spectral_norm`` and ``weight_norm`` a
    parameter beside it. A parametrization keeps the original, or parts of it: of torch's own the largest has
    the shape of the whole.
    """
    parameters, buffers = parameters_of(module), buffers_of(module)
    for key in (name, f"{name}_orig", f"{name}_v"):
        own = parameters.get(key, buffers.get(key))
        if own is not None:
            return own
    kept = state_of(module).get(name)
    if kept is not None and TENSOR in lineage(type(kept)):
        return cast("Tensor", kept)
    registered = children_of(module).get("parametrizations")
    parametrization = children_of(registered).get(name) if registered is not None else None
    if parametrization is None:
        return None
    parts = {**parameters_of(parametrization), **buffers_of(parametrization)}
    originals = [part for key, part in parts.items() if part is not None and key.startswith("original")]
    return max(originals, key=lambda part: part.numel(), default=None)


def forward_of(module: Any) -> Any:
    """Find the forward that a call of the module runs: its own, else its class's."""
    return state_of(module).get("forward", read_class(type(module), "forward"))


def method(thing: Any, name: str) -> Any:
    """Read a method that one of `LIBRARIES` wrote; None where the user's own class has it."""
    owner, found = _on_class(type(thing), name)
    if owner is None or _package(owner) not in LIBRARIES or not isinstance(found, FunctionType):
        return None
    return MethodType(found, thing)


@functools.cache
def _module() -> tuple[type, Callable[[Any], dict[str, Any]]]:
    """``nn.Module``, and what reads the dictionary of one past its classes."""
    from torch.nn import Module

    slot: Any = Module.__dict__["__dict__"]
    return Module, slot.__get__


def _on_class(kind: type, name: str) -> tuple[type | None, Any]:
    """Find the class in the lineage that holds an attribute, and what it holds."""
    for each in kind.__mro__:
        if name in each.__dict__:
            return each, each.__dict__[name]
    return None, NOWHERE


def _described(thing: Any, owner: type | None, found: Any, default: Any) -> Any:
    """Tell what a descriptor gives, where it is a slot, a method, or a library's."""
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


def _renamed(kind: type, name: str) -> str:
    """Read the name under which a configuration of transformers keeps an attribute (``attribute_map``, 4.57
    to 5.23)."""
    owner, _ = _on_class(kind, "__getattribute__")
    if owner is object or owner is None or _package(owner) != "transformers":
        return name
    names = read_class(kind, "attribute_map")
    return str(names.get(name, name)) if isinstance(names, dict) else name


def _members(module: Any, held: str) -> dict[str, Any]:
    """Tell what a module holds of one sort, past whatever its containers do when they are asked."""
    kind, state_of_module = _module()
    state = state_of_module(module) if issubclass(type(module), kind) else state_of(module)
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
