"""torch.compile on replicas: apply a user's own compile marks to a copy, and keep its cache apart from the user's code.

Private names read here, verified on torch 2.11 and 2.13: the closure variable ``self`` of a compiled callable (a
``torch._dynamo.eval_frame`` context, callable on a new function), ``_compiled_call_impl`` and
``_torchdynamo_orig_callable``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

from torch import nn


def context_of(compiled: Any) -> Callable[[Any], Any] | None:
    """What ``torch.compile`` made ``compiled`` with: calling it on another function compiles that one alike.

    Takes an ``OptimizedModule`` or a compiled function; None for anything else.
    """
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and hasattr(compiled, "_torchdynamo_orig_callable"):
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=False))
        context = cells["self"].cell_contents if "self" in cells else None
    return context if callable(context) else None


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(m)`` returns."""
    return any(cls.__name__ == "OptimizedModule" and cls.__module__.startswith("torch._dynamo") for cls in type(module).__mro__)


def give_own_code(model: nn.Module) -> None:
    """Give every module of ``model`` a subclass of its class with a code object of its own for ``forward``.

    Dynamo keeps its compiled graphs per code object, at most eight: without this, arms of one class push each other,
    and the user, into eager. The classes keep name and module, and isinstance holds.
    """
    own: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in own:
            own[kind] = _with_own_code(kind)
        if own[kind] is not kind:
            module.__class__ = own[kind]


def _with_own_code(kind: type[nn.Module]) -> type[nn.Module]:
    forward = kind.forward
    if not isinstance(forward, types.FunctionType) or kind.__module__.startswith(("torch.nn.", "torch._dynamo.")):
        return kind
    clone = clone_function(forward)
    metaclass: Any = type(kind)
    return cast(type[nn.Module], metaclass(kind.__name__, (kind,), {"forward": clone, "__module__": kind.__module__, "__qualname__": kind.__qualname__}))


def clone_function(function: types.FunctionType, closure: tuple[types.CellType, ...] | None = None) -> types.FunctionType:
    """The same function with a code object of its own and, if given, another closure."""
    clone = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, closure or function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    clone.__qualname__, clone.__module__, clone.__doc__ = function.__qualname__, function.__module__, function.__doc__
    clone.__dict__.update(function.__dict__)
    return clone
