"""Activation checkpointing: wrappers, hooks, transformers' flag, unsloth's patch, a call in a forward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.kind import Kind
from fp8doctor.facts import Checkpointing
from fp8doctor.stacks.code_names import LIBRARIES, named, names_in
from fp8doctor.stacks.looking import forward_of, home, is_a, modules_of, read, read_class, state_of
from fp8doctor.stacks.torch_private import CHECKPOINT_WRAPPERS, COMPOSABLE_CHECKPOINT, memory_budget, original

CHECKPOINT_MODULES = (
    "torch.utils.checkpoint",
    "transformer_engine.pytorch.distributed",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "unsloth_zoo.gradient_checkpointing",
)

ENDINGS = ("checkpoint", "checkpoint_sequential", "checkpointfunction", "checkpointer")
"""How their functions end; the others beside them set something, or move tensors."""

LAYER = ("transformers.modeling_layers", "GradientCheckpointingLayer")
UNSLOTH = ("unsloth_checkpoint", "unsloth_gradient_checkpoint", "unsloth_offloaded_gradient_checkpoint")

TRANSFORMER_ENGINE = "transformer_engine"
AUTOCASTS = frozenset(("autocast", "fp8_autocast"))
"""What it is called from 2.9 on, and what before (deprecated since)."""


def checkpointing_of(module: Any, name: str, kind: Kind) -> Checkpointing | None:
    """Read the checkpointing that this very module stands for, if any."""
    state = state_of(module)
    if (CHECKPOINT_WRAPPERS, "CheckpointWrapper") in kind.lineage:
        implementation = read(state.get("checkpoint_impl"), "name")
        reentrant = None if implementation is None else implementation == "REENTRANT"
        return Checkpointing(
            name=name,
            form="wrapper",
            active=read(module, "training"),
            reentrant=reentrant,
            **in_fp8(module, state.get("checkpoint_fn")),
        )
    if (CHECKPOINT_WRAPPERS, "OffloadWrapper") in kind.lineage:
        return Checkpointing(name=name, form="offload", active=read(module, "training"), reentrant=None)
    if state.get("gradient_checkpointing", kind.once(_flag_of_class)) is True:
        function = state.get("_gradient_checkpointing_func")
        return Checkpointing(
            name=name,
            form="huggingface",
            active=read(module, "training"),
            reentrant=_reentrant(function),
            **in_fp8(module, function),
        )
    hooks = [hook for hook in state.get("_forward_pre_hooks", {}).values() if is_composable(hook)]
    if hooks:
        return Checkpointing(
            name=name, form="composable", active=True, reentrant=False, **in_fp8(module, hooks[0])
        )
    if whole_forward(module):
        function = forward_of(module)
        return Checkpointing(
            name=name,
            form="whole_forward",
            active=True,
            reentrant=_reentrant(function),
            **in_fp8(module, function),
        )
    named_there = names_checkpoint(forward_of(module), kind.of) if "forward" in state else None
    if not (kind.once(_names_checkpoint) if named_there is None else named_there):
        return None
    return Checkpointing(name=name, form="called_in_forward", active=None, reentrant=None)


def names_checkpoint(forward: Any, kind: type) -> bool:
    """Whether a forward of this class names a checkpoint function, which it may call."""
    return any("checkpoint" in name or is_checkpoint(value) for name, value in named(forward, kind.__mro__))


def is_checkpoint(value: Any) -> bool:
    """Whether this is a function, or an autograd function, that recomputes what it is given."""
    return (
        (is_a(value, FunctionType) or is_a(value, type))
        and value.__module__ in CHECKPOINT_MODULES
        and value.__name__.lower().endswith(ENDINGS)
    )


def is_composable(hook: Any) -> bool:
    """Whether this hook is one by which torch's composable checkpoint begins or ends a region."""
    return bool(read(hook, "__module__") == COMPOSABLE_CHECKPOINT)


def whole_forward(module: Any) -> bool:
    """Whether ``module.forward`` is a checkpoint function with the forward as its argument."""
    return is_checkpoint(read(forward_of(module), "func"))


def _reentrant(function: Any) -> bool | None:
    """``use_reentrant`` of a ``functools.partial``; None where it is not given there."""
    given = (read(function, "keywords") or {}).get("use_reentrant")
    return given if isinstance(given, bool) else None


def in_fp8(region: Any, function: Any) -> dict[str, Any]:
    """Find what decides whether Transformer Engine recomputes in FP8, once its package is loaded."""
    if TRANSFORMER_ENGINE not in sys.modules:
        return {}
    opens = opens_fp8_autocast(region)
    return {"library": package(function), "opens_fp8_autocast": opens, "fp8_autocast_around": False}


def huggingface_flag(module: Any) -> bool | None:
    """``module.gradient_checkpointing`` where there is one, without running a property."""
    flag = state_of(module).get("gradient_checkpointing", _flag_of_class(type(module)))
    return flag if isinstance(flag, bool) else None


def _flag_of_class(kind: type) -> Any:
    return read_class(kind, "gradient_checkpointing")


def _names_checkpoint(kind: type) -> bool:
    return names_checkpoint(read_class(kind, "forward"), kind)


def is_layer(kind: Kind) -> bool:
    """Whether a module's own flag decides (transformers >= 4.53) and not the flag above."""
    return LAYER in kind.lineage


def forwards(module: Any) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """List the code of a module's forward and of the wrappers around it, each with the names bound around
    it."""
    for link in chain(forward_of(module)):
        function = original(link) or link
        function = read(function, "__func__", function)
        code = read(function, "__code__")
        if isinstance(code, CodeType):
            yield code, function.__globals__


def package(value: Any) -> str | None:
    """Name the package of a module, or of a function behind any ``functools.partial``."""
    while issubclass(type(value), functools.partial):
        value = value.func
    name = _module(value)
    return name.partition(".")[0] if name else None


def opens_fp8_autocast(region: Any) -> bool:
    """Whether a forward inside this region names Transformer Engine's autocast."""
    own = [each for _, each in modules_of(region) if not home(type(each)).startswith(LIBRARIES)]
    return any(_open(forwards(each)) for each in own)


def _open(codes: Iterable[tuple[CodeType, dict[str, Any]]]) -> bool:
    """Whether one of these functions names Transformer Engine's autocast, and something of its package."""
    for code, bound in codes:
        names = set(names_in(code))
        if not names.isdisjoint(AUTOCASTS) and any(
            name.startswith(TRANSFORMER_ENGINE) or package(bound.get(name)) == TRANSFORMER_ENGINE
            for name in names
        ):
            return True
    return False


def of_the_process(active: bool | None) -> tuple[Checkpointing, ...]:
    """Checkpointing that holds for the whole process: unsloth's patch and the compiler's memory budget.

    ``active`` says whether some module asks for checkpointing, which is what unsloth's patch then serves.
    """
    found = []
    torch_checkpoint = sys.modules.get("torch.utils.checkpoint")
    if getattr(getattr(torch_checkpoint, "checkpoint", None), "__name__", None) in UNSLOTH:
        found.append(Checkpointing(name="", form="unsloth", active=active, reentrant=None))
    if memory_budget() < 1.0:
        found.append(Checkpointing(name="", form="compiler_budget", active=True, reentrant=None))
    return tuple(found)


def _module(value: Any) -> str | None:
    """Name a module, or the module that a function is from."""
    name = read(value, "__name__" if issubclass(type(value), ModuleType) else "__module__")
    return name if isinstance(name, str) else None
