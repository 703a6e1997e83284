"""Activation checkpointing: wrappers, hooks, transformers' flag, unsloth's patch, a call in a forward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fp8doctor.examine.checkpoint_calls import LIBRARIES, called_checkpoint, is_checkpoint, names_checkpoint
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.kind import Kind
from fp8doctor.facts import Checkpointing
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.lineage import home
from fp8doctor.stacks.looking import forward_of, modules_of, read, read_class, state_of

WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
LAYER = ("transformers.modeling_layers", "GradientCheckpointingLayer")
UNSLOTH = ("unsloth_checkpoint", "unsloth_gradient_checkpoint", "unsloth_offloaded_gradient_checkpoint")
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
"""Where the hooks of ``torch.distributed._composable.checkpoint`` are from (torch 2.6 to 2.15)."""

TRANSFORMER_ENGINE = "transformer_engine"
AUTOCASTS = frozenset(("autocast", "fp8_autocast"))
"""What it is called from 2.9 on, and what before (deprecated since)."""


def checkpointing_of(module: Any, name: str, kind: Kind) -> Checkpointing | None:
    """Read the checkpointing that this very module stands for, if any."""
    state = state_of(module)
    if (WRAPPERS, "CheckpointWrapper") in kind.lineage:
        implementation = read(state.get("checkpoint_impl"), "name")
        reentrant = None if implementation is None else implementation == "REENTRANT"
        return Checkpointing(
            name=name,
            form="wrapper",
            active=read(module, "training"),
            reentrant=reentrant,
            **in_fp8(module, state.get("checkpoint_fn")),
        )
    if (WRAPPERS, "OffloadWrapper") in kind.lineage:
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
    if "forward" not in state and not kind.once(_names_checkpoint):
        return None
    if (called := called_checkpoint(module)) is None:
        return None
    return Checkpointing(
        name=name,
        form="whole_forward" if whole_forward(module) else "called_in_forward",
        active=True if called.certain else None,
        flag=called.flag or NOT_RECORDED,
        reentrant=_reentrant(forward_of(module)),
        **in_fp8(module, called.function, whole=whole_forward(module)),
    )


def is_composable(hook: Any) -> bool:
    """Whether this hook is one by which torch's composable checkpoint begins or ends a region."""
    return bool(read(hook, "__module__") == COMPOSABLE)


def whole_forward(module: Any) -> bool:
    """Whether ``module.forward`` is a checkpoint function with the forward as its argument."""
    return is_checkpoint(read(forward_of(module), "func"))


def _reentrant(function: Any) -> bool | None:
    """``use_reentrant`` of a ``functools.partial``; None where it is not given there."""
    given = (read(function, "keywords") or {}).get("use_reentrant")
    return given if isinstance(given, bool) else None


def in_fp8(region: Any, function: Any, whole: bool = True) -> dict[str, Any]:
    """Find what decides whether Transformer Engine recomputes in FP8, once its package is loaded; ``whole``
    is a region whose own forward is recomputed too."""
    if TRANSFORMER_ENGINE not in sys.modules:
        return {}
    opens = opens_fp8_autocast(region, whole)
    around = not whole and not opens and _open(forwards(region))
    return {"library": package(function), "opens_fp8_autocast": opens, "fp8_autocast_around": around}


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
        function = read(link, "_torchdynamo_orig_callable", link)
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


def opens_fp8_autocast(region: Any, whole: bool = True) -> bool:
    """Whether what this region recomputes names Transformer Engine's autocast.

    A forward that calls checkpoint itself is not recomputed: of it the functions inside it count, and the
    methods that it names.
    """
    below = [each for name, each in modules_of(region) if whole or name]
    recomputed = [each for each in below if not home(type(each)).startswith(LIBRARIES)]
    return any(_open(forwards(each)) for each in recomputed) or (not whole and _called_open(region))


def _called_open(region: Any) -> bool:
    """Whether a function inside a module's forward, or a method of its class that the forward names, does."""
    for code, scope in forwards(region):
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        known = set(names_in(code))
        if any(_opens(set(names_in(each)), known, scope) for each in inner):
            return True
        methods = (read_class(type(region), name) for name in code.co_names)
        if _open((each.__code__, each.__globals__) for each in methods if isinstance(each, FunctionType)):
            return True
    return False


def _open(codes: Iterable[tuple[CodeType, dict[str, Any]]]) -> bool:
    """Whether one of these functions names Transformer Engine's autocast."""
    return any(_opens(names, names, scope) for code, scope in codes if (names := set(names_in(code))))


def _opens(used: set[str], known: set[str], bound: dict[str, Any]) -> bool:
    """Whether an autocast is among the names used, and something of Transformer Engine's among those known
    there."""
    return not used.isdisjoint(AUTOCASTS) and any(
        name.startswith(TRANSFORMER_ENGINE) or package(bound.get(name)) == TRANSFORMER_ENGINE
        for name in known
    )


def of_the_process(active: bool | None) -> tuple[Checkpointing, ...]:
    """Checkpointing that holds for the whole process: unsloth's patch and the compiler's memory budget.

    ``active`` says whether some module asks for checkpointing, which is what unsloth's patch then serves.
    """
    found = []
    torch_checkpoint = sys.modules.get("torch.utils.checkpoint")
    if getattr(getattr(torch_checkpoint, "checkpoint", None), "__name__", None) in UNSLOTH:
        found.append(Checkpointing(name="", form="unsloth", active=active, reentrant=None))
    budget = getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)
    if isinstance(budget, int | float) and budget < 1.0:
        found.append(Checkpointing(name="", form="compiler_budget", active=True, reentrant=None))
    return tuple(found)


def _module(value: Any) -> str | None:
    """Name a module, or the module that a function is from."""
    name = read(value, "__name__" if issubclass(type(value), ModuleType) else "__module__")
    return name if isinstance(name, str) else None
