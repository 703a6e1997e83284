"""Where torch.compile was asked for: the marks that each way of asking leaves on a module (torch 2.6 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fp8doctor.facts import CompileMark
from fp8doctor.stacks.lineage import lineage

OPTIMIZED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")


def compile_mark(module: Any, name: str) -> CompileMark | None:
    """The mark on this very module, if there is one; a wrapper's mark carries the name of what it wraps."""
    state = vars(module)
    if OPTIMIZED_MODULE in lineage(type(module)):
        return CompileMark(name=name, form="wrapped", backend=_backend(getattr(state.get("dynamo_ctx"), "callback", None)))
    if state.get("_compiled_call_impl") is not None:
        return CompileMark(name=name, form="in_place", backend=_backend_of_function(state["_compiled_call_impl"]))
    if (compiled := compiled_function(state.get("forward"))) is not None:
        return CompileMark(name=name, form="assigned_forward", backend=_backend_of_function(compiled))
    if "forward" not in state and (compiled := compiled_function(type(module).forward)) is not None:
        return CompileMark(name=name, form="decorated_forward", backend=_backend_of_function(compiled))
    return None


def step_mark(training_step: Callable[..., Any] | None) -> CompileMark | None:
    """The mark of a compiled training step, which covers the whole model."""
    compiled = compiled_function(training_step)
    return None if compiled is None else CompileMark(name="", form="training_step", backend=_backend_of_function(compiled))


def compiled_function(function: Any) -> Any:
    """The compiled link in a chain of wrappers, or None; `torch.compiler.disable` outside of it ends the search."""
    for link in chain(function):
        if getattr(link, "_torchdynamo_disable", False):
            return None
        if hasattr(link, "_torchdynamo_orig_callable"):
            return link
    return None


def is_disabled(module: Any) -> bool:
    """Whether `torch.compiler.disable` keeps Dynamo out of this module's forward and of all that it calls."""
    for link in chain(vars(module).get("forward", type(module).forward)):
        if getattr(link, "_torchdynamo_disable", False):
            return getattr(link, "_torchdynamo_disable_recursive", True) is not False
        if hasattr(link, "_torchdynamo_orig_callable"):
            return False
    return False


def chain(function: Any) -> Iterator[Any]:
    """A function and what it wraps, outermost first, along ``__wrapped__``; at most 32 links."""
    for _ in range(32):
        if function is None:
            return
        yield function
        function = getattr(function, "__wrapped__", None)


def _backend_of_function(function: Any) -> str | None:
    """The backend in the closure of the wrapper that torch.compile made."""
    for link in chain(function):
        code = getattr(getattr(link, "__func__", link), "__code__", None)
        cells = getattr(getattr(link, "__func__", link), "__closure__", None) or ()
        if code is not None and "callback" in code.co_freevars:
            return _backend(cells[code.co_freevars.index("callback")].cell_contents)
    return None


def _backend(callback: Any) -> str | None:
    """The name of the innermost backend; 2.6 chains them by the name that later versions keep for functions."""
    for _ in range(32):
        inner = getattr(callback, "_torchdynamo_orig_backend", None) or getattr(callback, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        callback = inner
    name = getattr(callback, "compiler_name", None) or getattr(callback, "__name__", None)
    return name if isinstance(name, str) else None
