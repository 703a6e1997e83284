"""torch.compile on replicas: keep their caches apart from the user's, and handle compiled modules."""

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from fp8doctor.stacks.torch_private import (
    DYNAMO,
    behind_compile,
    compiled_call,
    context_of,
    is_dynamos_frame,
    original,
    settings_of,
)


def compile_settings(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield backend and other settings of every compile mark in the model, as `settings_of` gives them."""
    for module in model.modules():
        for mark in (module, compiled_call(module), module.__dict__.get("forward"), type(module).forward):
            if (context := context_of(mark)) is not None:
                yield settings_of(context)


def has_settings(model: nn.Module) -> bool:
    """Return whether a compile mark has a backend, a mode, options or shapes that are not the default."""
    default = settings_of(context_of(torch.compile(lambda: None)))  # type: ignore[misc]
    return any(each != default for each in compile_settings(model))


def own_step(function: Any, *, as_compiled: bool) -> Any:
    """Return the user's training step; a compiled one with its own code object, or uncompiled."""
    context, inner = context_of(function), original(function)
    if context is None or not isinstance(inner, types.FunctionType):
        return function
    return context(clone_function(inner)) if as_compiled else inner


def records_cuda_graphs(model: nn.Module) -> bool:
    """Return whether a compiled module records CUDA graphs, which hold addresses of this model."""
    return any((options or {}).get("triton.cudagraphs") for options, _ in compile_settings(model))


def give_own_code(model: nn.Module, own: dict[type[nn.Module], type[nn.Module]] | None = None) -> None:
    """Give every module a subclass of its class with its own code objects for ``forward`` and other methods.

    A graph break makes any method a frame of its own (docs/traps.md). Models that get the same ``own``, which
    is filled, share compiled graphs.
    """
    own = {} if own is None else own
    for module in model.modules():
        kind = type(module)
        if kind not in own:
            own[kind] = _with_own_code(kind)
        if own[kind] is not kind:
            module.__class__ = own[kind]
    give_wrappers_own_code(model)


def give_wrappers_own_code(model: nn.Module) -> None:
    """Give the ``torch.compile`` wrappers around torch.nn classes a code object of their own.

    Dynamo skips the forward of those classes, and compiles the same internal function for all of them.
    """
    codes: dict[types.CodeType, types.CodeType] = {}
    for wrapper in (each for each in model.modules() if behind_compile(each) is not None):
        compiled, context = wrapper.__dict__.get("forward"), context_of(wrapper)
        frame = original(compiled)
        if context is not None and isinstance(frame, types.FunctionType) and is_dynamos_frame(frame):
            clone = clone_function(frame)
            clone.__code__ = codes.setdefault(frame.__code__, clone.__code__)
            wrapper.__dict__["forward"] = context(clone)


def _with_own_code(kind: type[nn.Module]) -> type[nn.Module]:
    forward = kind.forward
    if not isinstance(forward, types.FunctionType) or kind.__module__.startswith(("torch.nn.", DYNAMO)):
        return kind
    metaclass: Any = type(kind)
    own = cast(
        type[nn.Module],
        metaclass(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}),
    )
    rebuild, names = Rebuilding({}), {"forward"}
    for base in kind.__mro__:
        if not base.__module__.startswith("torch."):
            names |= {name for name in vars(base) if not name.startswith("__")}
    # Set afterwards, because transformers' layers wrap every new subclass's forward in the same code object.
    for name in names:
        method = inspect.getattr_static(kind, name)
        if isinstance(method, types.FunctionType):
            setattr(own, name, rebuild.of(method))
    return own


def clone_function(
    function: types.FunctionType, closure: tuple[types.CellType, ...] | None = None
) -> types.FunctionType:
    """Copy a function with its own code object and, if given, another closure."""
    clone = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        closure or function.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(clone, name, getattr(function, name))
    clone.__dict__.update(function.__dict__)
    return clone


class Rebuilding:
    """Clones functions with code objects of their own, around ``copies`` of what they close over, by ``id``.

    A function that names itself, or that another one here names, names the clone.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._made: dict[int, types.FunctionType] = {}

    def of(self, value: Any) -> Any:
        """Return the clone of a function, method or partial, the copy of an object, or the value itself."""
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            named = {key: self.of(each) for key, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        if not isinstance(value, types.FunctionType):
            return self._copies.get(id(value), value)
        if (context := context_of(value)) is not None:
            return context(self.of(original(value)))
        if not value.__closure__ and value.__module__.startswith("torch."):
            return value
        if id(value) not in self._made:
            cells = tuple(types.CellType() for _ in value.__closure__ or ())
            clone = self._made[id(value)] = clone_function(value, cells)
            clone.__defaults__ = value.__defaults__ and tuple(map(self.of, value.__defaults__))
            for new, old in zip(cells, value.__closure__ or (), strict=True):
                if old != types.CellType():
                    new.cell_contents = self.of(old.cell_contents)
            if "__wrapped__" in clone.__dict__:
                clone.__dict__["__wrapped__"] = self.of(clone.__dict__["__wrapped__"])
        return self._made[id(value)]
