"""Read the marks that torch.compile leaves on a module (torch 2.6 to 2.15)."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fp8doctor.facts import CompileMark
from fp8doctor.stacks.looking import forward_of, held_by, lineage, read, state_of
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
        backend = read(state.get("dynamo_ctx"), "callback")
        mark = _mark(name, "wrapped", backend, is_called(module))
        return None if is_disabled(module) else mark  # as torch.compiler.disable(m) is
    if (call := state.get(COMPILED_CALL)) is not None:
        return _mark(name, "in_place", _backend_of(call), _compiles_in_place(module, call))
    if (compiled := compiled_function(forward_of(module))) is None:
        return None
    form = "assigned_forward" if "forward" in state else "decorated_forward"
    return _mark(name, form, _backend_of(compiled), True)


def step_mark(training_step: Callable[..., Any] | None, *, seen: bool = False) -> CompileMark | None:
    """Return the mark of a compiled step, also of one that was only ``seen`` to run."""
    if (compiled := compiled_function(training_step)) is None and not seen:
        return None
    return _mark("", "training_step", _backend_of(compiled), True)


def _mark(name: str, form: Any, backend: Any, compiles: bool | None) -> CompileMark:
    for _ in range(32):
        backend = inner_backend(backend) or backend
    word = read(backend, "compiler_name") or read(backend, "__name__")
    return CompileMark(
        name=name, form=form, backend=word if isinstance(word, str) else None, compiles=compiles
    )


def _backend_of(function: Any) -> Any:
    return next((found for link in chain(function) if (found := held_by(link, "callback")) is not None), None)


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
    link = _marked(function)
    return None if link is None or disabled(link) else link


def is_disabled(module: Any) -> bool:
    """Tell if `torch.compiler.disable` keeps Dynamo out of this module's forward."""
    link = _marked(forward_of(module))
    return link is not None and disabled(link) and disabled_below(link)


def _marked(function: Any) -> Any:
    return next((link for link in chain(function) if disabled(link) or original(link) is not None), None)


def chain(function: Any) -> Iterator[Any]:
    """Yield a function and those it wraps (``__wrapped__``), at most 32."""
    for _ in range(32):
        if function is None:
            return
        yield function
        function = read(function, "__wrapped__")
