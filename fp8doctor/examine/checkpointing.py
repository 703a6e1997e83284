"""Activation checkpointing: wrappers, transformers' flag, unsloth's patch, a call in a forward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from fp8doctor.examine.code_names import names_in
from fp8doctor.examine.compile_marks import chain
from fp8doctor.facts import Checkpointing
from fp8doctor.stacks.lineage import home, lineage
from fp8doctor.stacks.looking import forward_of, modules_of, read, read_class, state_of

WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
LAYER = ("transformers.modeling_layers", "GradientCheckpointingLayer")
UNSLOTH = ("unsloth_checkpoint", "unsloth_gradient_checkpoint", "unsloth_offloaded_gradient_checkpoint")
CHECKPOINT_MODULES = (
    "torch.utils.checkpoint",
    "transformer_engine.pytorch.distributed",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "unsloth_zoo.gradient_checkpointing",
)
TRANSFORMER_ENGINE = "transformer_engine"
AUTOCASTS = frozenset(("autocast", "fp8_autocast"))
"""What it is called from 2.9 on, and what before (deprecated since)."""

LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "transformer_engine.", "torchao.")
"""Whose forwards decide by a flag or a wrapper of their own; only a user's forward is searched for calls."""


def checkpointing_of(module: Any, name: str) -> Checkpointing | None:
    """The checkpointing that this very module stands for, if any."""
    if (WRAPPERS, "CheckpointWrapper") in lineage(type(module)):
        implementation = read(state_of(module).get("checkpoint_impl"), "name")
        reentrant = None if implementation is None else implementation == "REENTRANT"
        return Checkpointing(
            name=name,
            form="wrapper",
            active=read(module, "training"),
            reentrant=reentrant,
            **in_fp8(module, state_of(module).get("checkpoint_fn")),
        )
    if (WRAPPERS, "OffloadWrapper") in lineage(type(module)):
        return Checkpointing(name=name, form="offload", active=read(module, "training"), reentrant=None)
    flag = huggingface_flag(module)
    if flag:
        function = state_of(module).get("_gradient_checkpointing_func")
        reentrant = (read(function, "keywords") or {}).get("use_reentrant")
        reentrant = reentrant if isinstance(reentrant, bool) else None
        return Checkpointing(
            name=name,
            form="huggingface",
            active=read(module, "training"),
            reentrant=reentrant,
            **in_fp8(module, function),
        )
    if flag is None and (called := called_checkpoint(module)):
        return Checkpointing(
            name=name, form="called_in_forward", active=None, reentrant=None, **in_fp8(module, called)
        )
    return None


def in_fp8(region: Any, function: Any) -> dict[str, Any]:
    """Find what decides whether Transformer Engine recomputes in FP8, once its package is loaded."""
    if TRANSFORMER_ENGINE not in sys.modules:
        return {}
    return {"library": package(function), "opens_fp8_autocast": opens_fp8_autocast(region)}


def huggingface_flag(module: Any) -> bool | None:
    """``module.gradient_checkpointing`` where there is one, without running a property."""
    flag = state_of(module).get("gradient_checkpointing", read_class(type(module), "gradient_checkpointing"))
    return flag if isinstance(flag, bool) else None


def is_layer(module: Any) -> bool:
    """Whether its own flag decides (transformers >= 4.53) and not the flag above."""
    return LAYER in lineage(type(module))


def called_checkpoint(module: Any) -> Any:
    """The checkpoint function, or its module, that a user's own forward names, whatever it is called there;
    None when it names none."""
    if home(type(module)).startswith(LIBRARIES):
        return None
    return next(
        (
            found
            for code, scope in forwards(module)
            if (found := _checkpoint_named(set(names_in(code)), scope))
        ),
        None,
    )


def forwards(module: Any) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The code of a module's forward and of the wrappers around it, each with the names bound around it."""
    for link in chain(forward_of(module)):
        function = read(link, "_torchdynamo_orig_callable", link)
        function = read(function, "__func__", function)
        code = read(function, "__code__")
        if isinstance(code, CodeType):
            yield code, function.__globals__


def package(value: Any) -> str | None:
    """The package of a module, or of a function behind any ``functools.partial``."""
    while issubclass(type(value), functools.partial):
        value = value.func
    name = _module(value)
    return name.partition(".")[0] if name else None


def opens_fp8_autocast(region: Any) -> bool:
    """Whether a forward in this region names Transformer Engine's autocast."""
    modules = (each for _, each in modules_of(region) if not home(type(each)).startswith(LIBRARIES))
    return any(_opens(set(names_in(code)), scope) for each in modules for code, scope in forwards(each))


def _opens(used: set[str], bound: dict[str, Any]) -> bool:
    """Whether these names hold an autocast and something of Transformer Engine's."""
    return not used.isdisjoint(AUTOCASTS) and any(
        name.startswith(TRANSFORMER_ENGINE) or package(bound.get(name)) == TRANSFORMER_ENGINE for name in used
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


def _checkpoint_named(used: set[str], bound: dict[str, Any]) -> Any:
    """What leads the names in a forward to a checkpoint function: what is bound to it, or its module."""
    if (
        "checkpoint" in used
        and "checkpoint" not in bound
        and not used.isdisjoint(("utils", "checkpointing", *CHECKPOINT_MODULES))
    ):
        imported = next(
            (name for name in CHECKPOINT_MODULES if name in used),
            "torch.utils.checkpoint" if "utils" in used else CHECKPOINT_MODULES[2],
        )
        return sys.modules.get(imported) or imported
    return next(
        (bound[name] for name in used if name in bound and _module(bound[name]) in CHECKPOINT_MODULES), None
    )


def _module(value: Any) -> str | None:
    """The name of a module, or of the module that a function is from."""
    name = read(value, "__name__" if issubclass(type(value), ModuleType) else "__module__")
    return name if isinstance(name, str) else None
