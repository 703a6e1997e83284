"""Find the marks of torch.compile (torch 2.6 to 2.15) and of activation checkpointing on a module."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from fp8doctor.facts import Checkpointing, CompileMark
from fp8doctor.stacks.code_names import from_library, named
from fp8doctor.stacks.looking import (
    forward_of,
    held_by,
    is_a,
    lineage,
    modules_of,
    read,
    read_class,
    state_of,
)
from fp8doctor.stacks.torch_private import (
    CHECKPOINT_WRAPPERS,
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


CHECKPOINT_MODULES = (
    "torch.utils.checkpoint",
    "transformer_engine.pytorch.distributed",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "unsloth_zoo.gradient_checkpointing",
)

TRANSFORMER_ENGINE = "transformer_engine"


def checkpointing_of(module: Any, name: str) -> Checkpointing | None:
    state = state_of(module)

    def found(form: Any, reentrant: bool | None, function: Any) -> Checkpointing:
        active, fp8 = read(module, "training"), in_fp8(module, function)
        return Checkpointing(name=name, form=form, active=active, reentrant=reentrant, **fp8)

    if (CHECKPOINT_WRAPPERS, "CheckpointWrapper") in lineage(type(module)):
        implementation = read(state.get("checkpoint_impl"), "name")
        reentrant = None if implementation is None else implementation == "REENTRANT"
        return found("wrapper", reentrant, state.get("checkpoint_fn"))
    if huggingface_flag(module):
        function = state.get("_gradient_checkpointing_func")
        given = (read(function, "keywords") or {}).get("use_reentrant")
        return found("huggingface", given if isinstance(given, bool) else None, function)
    reached = named(forward_of(module), type(module).__mro__)
    if not any("checkpoint" in called or is_checkpoint(value) for called, value in reached):
        return None
    return Checkpointing(name=name, form="called_in_forward", active=None, reentrant=None)


def is_checkpoint(value: Any) -> bool:
    """Tell if this function, or autograd function, recomputes its argument.

    Other functions of these modules set options or move tensors.
    """
    endings = ("checkpoint", "checkpoint_sequential", "checkpointfunction", "checkpointer")
    return (
        is_a(value, (FunctionType, type))
        and value.__module__ in CHECKPOINT_MODULES
        and value.__name__.lower().endswith(endings)
    )


def in_fp8(region: Any, function: Any) -> dict[str, Any]:
    """Return what decides if Transformer Engine recomputes in FP8, if it is loaded."""
    if TRANSFORMER_ENGINE not in sys.modules:
        return {}
    own = [each for _, each in modules_of(region) if not from_library(type(each))]
    opens = any(name_fp8_autocast(named(forward_of(each), type(each).__mro__)) for each in own)
    return {"library": package(function), "opens_fp8_autocast": opens, "fp8_autocast_around": False}


def huggingface_flag(module: Any) -> bool | None:
    """Return ``module.gradient_checkpointing`` without running a property, or None."""
    name = "gradient_checkpointing"
    flag = state_of(module).get(name, read_class(type(module), name))
    return flag if isinstance(flag, bool) else None


def is_layer(module: Any) -> bool:
    """Tell if a module's own flag decides (transformers >= 4.53), not the model's."""
    return ("transformers.modeling_layers", "GradientCheckpointingLayer") in lineage(type(module))


def package(value: Any) -> str | None:
    while issubclass(type(value), functools.partial):
        value = value.func
    name = read(value, "__name__" if issubclass(type(value), ModuleType) else "__module__")
    return name.partition(".")[0] if isinstance(name, str) else None


def name_fp8_autocast(found: Iterable[tuple[str, Any]]) -> bool:
    """Tell if TE's autocast (its name from 2.9, or before) and package are among these names and values."""
    values = dict(found)
    return not {"autocast", "fp8_autocast"}.isdisjoint(values) and any(
        name.startswith(TRANSFORMER_ENGINE) or package(value) == TRANSFORMER_ENGINE
        for name, value in values.items()
    )
