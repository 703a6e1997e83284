"""Read the marks that torch.compile leaves on a module (torch 2.6 to 2.15)."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fp8doctor.facts import CompileMark
from fp8doctor.stacks.looking import forward_of, lineage, read, state_of
from fp8doctor.stacks.torch_private import (
    COMPILED_CALL,
    OPTIMIZED_MODULE,
    behind_compile,
    call_code,
    disabled,
    disabled_below,
    inner_backend,
    original,
)


def compile_mark(module: Any, name: str) -> CompileMark | None:
    """Return the mark on this module, or None; a wrapper's has the wrapped name."""
    state = state_of(module)
    if OPTIMIZED_MODULE in lineage(type(module)):
        if is_disabled(module):  # what torch.compiler.disable(m) returns
            return None
        backend = _backend(read(state.get("dynamo_ctx"), "callback"))
        return CompileMark(name=name, form="wrapped", backend=backend, compiles=is_called(module))
    if (call := state.get(COMPILED_CALL)) is not None:
        compiles = _compiles_in_place(module, call)
        return CompileMark(name=name, form="in_place", backend=_backend_of_function(call), compiles=compiles)
    compiled = compiled_function(forward_of(module))
    if compiled is None:
        return None
    return CompileMark(
        name=name,
        form="assigned_forward" if "forward" in state else "decorated_forward",
        backend=_backend_of_function(compiled),
        compiles=True,
    )


def step_mark(training_step: Callable[..., Any] | None, *, seen: bool = False) -> CompileMark | None:
    """Return the mark of a compiled step, also of one that was only ``seen`` to run."""
    if (compiled := compiled_function(training_step)) is None and not seen:
        return None
    return CompileMark(name="", form="training_step", backend=_backend_of_function(compiled), compiles=True)


def forward_of_torch(module: Any) -> bool:
    """Tell if the forward is in torch.nn, whose files Dynamo skips at the top level."""
    return str(read(forward_of(module), "__globals__", {}).get("__name__", "")).startswith("torch.nn.")


def is_called(module: Any) -> bool:
    """Tell if the module has a forward; a ModuleList or a wrapper around it has none."""
    if (inside := behind_compile(module)) is not None:
        return is_called(inside)
    return forward_of(module) is not nn.Module.forward


def _compiles_in_place(module: Any, call: Any) -> bool | None:
    """Tell if ``module.compile()`` compiles a frame of the module.

    Before torch 2.14 it compiles `call_code`, a frame that Dynamo skips like forwards of torch.nn; 2.14 adds
    a frame that is not skipped. Frames counted on torch 2.6, 2.9, 2.13, 2.14 and 2.15.
    """
    if not is_called(module):
        return False
    if not forward_of_torch(module):
        return True
    inner, skipped = original(call), call_code()
    return None if inner is None or skipped is None else read(inner, "__code__") is not skipped


def compiled_function(function: Any) -> Any:
    """Find the compiled function in a chain of wrappers, up to a disabled one."""
    for link in chain(function):
        if disabled(link):
            return None
        if original(link) is not None:
            return link
    return None


def is_disabled(module: Any) -> bool:
    """Tell if `torch.compiler.disable` keeps Dynamo out of this module's forward."""
    for link in chain(forward_of(module)):
        if disabled(link):
            return disabled_below(link)
        if original(link) is not None:
            return False
    return False


def chain(function: Any) -> Iterator[Any]:
    """Yield a function and those it wraps (``__wrapped__``), at most 32."""
    for _ in range(32):
        if function is None:
            return
        yield function
        function = read(function, "__wrapped__")


def _backend_of_function(function: Any) -> str | None:
    for link in chain(function):
        code, cells = read(link, "__code__"), read(link, "__closure__") or ()
        if code is not None and "callback" in code.co_freevars:
            return _backend(cells[code.co_freevars.index("callback")].cell_contents)
    return None


def _backend(callback: Any) -> str | None:
    for _ in range(32):
        inner = inner_backend(callback)
        if inner is None:
            break
        callback = inner
    name = read(callback, "compiler_name") or read(callback, "__name__")
    return name if isinstance(name, str) else None
