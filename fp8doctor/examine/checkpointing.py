"""Activation checkpointing in all its forms: wrappers, transformers' flag, unsloth's patch, a call in a forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from fp8doctor.examine.compile_marks import chain
from fp8doctor.facts import Checkpointing
from fp8doctor.stacks.lineage import lineage

WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
LAYER = ("transformers.modeling_layers", "GradientCheckpointingLayer")
UNSLOTH = ("unsloth_checkpoint", "unsloth_gradient_checkpoint", "unsloth_offloaded_gradient_checkpoint")
CHECKPOINT_MODULES = (
    "torch.utils.checkpoint",
    "transformer_engine.pytorch.distributed",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "unsloth_zoo.gradient_checkpointing",
)
LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "transformer_engine.", "torchao.")
"""Whose forwards decide by a flag or a wrapper of their own; only a user's forward is searched for calls."""


def checkpointing_of(module: Any, name: str) -> Checkpointing | None:
    """The checkpointing that this very module stands for, if any."""
    if (WRAPPERS, "CheckpointWrapper") in lineage(type(module)):
        implementation = getattr(vars(module).get("checkpoint_impl"), "name", None)
        return Checkpointing(name=name, form="wrapper", active=module.training, reentrant=None if implementation is None else implementation == "REENTRANT")
    if (WRAPPERS, "OffloadWrapper") in lineage(type(module)):
        return Checkpointing(name=name, form="offload", active=module.training, reentrant=None)
    flag = huggingface_flag(module)
    if flag:
        function = vars(module).get("_gradient_checkpointing_func")
        reentrant = (getattr(function, "keywords", None) or {}).get("use_reentrant")
        return Checkpointing(name=name, form="huggingface", active=module.training, reentrant=reentrant if isinstance(reentrant, bool) else None)
    if flag is None and calls_checkpoint(module):
        return Checkpointing(name=name, form="called_in_forward", active=None, reentrant=None)
    return None


def huggingface_flag(module: Any) -> bool | None:
    """``module.gradient_checkpointing`` where there is one, without running a property."""
    flag = vars(module).get("gradient_checkpointing", getattr(type(module), "gradient_checkpointing", None))
    return flag if isinstance(flag, bool) else None


def is_layer(module: Any) -> bool:
    """Whether its own flag decides (transformers >= 4.53); in other models the flag above decides for the blocks."""
    return LAYER in lineage(type(module))


def calls_checkpoint(module: Any) -> bool:
    """Whether a user's own forward names torch's ``checkpoint``, whatever it is called there."""
    if type(module).__module__.startswith(LIBRARIES):
        return False
    forward = vars(module).get("forward", type(module).forward)
    for link in chain(forward):
        function = getattr(link, "_torchdynamo_orig_callable", link)
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and _names_checkpoint(set(_names(code)), function.__globals__):
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
    budget = getattr(sys.modules.get("torch._functorch.config"), "activation_memory_budget", 1.0)
    if isinstance(budget, int | float) and budget < 1.0:
        found.append(Checkpointing(name="", form="compiler_budget", active=True, reentrant=None))
    return tuple(found)


def _names(code: CodeType) -> Iterator[str]:
    """Names used by a function and by the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _names_checkpoint(used: set[str], bound: dict[str, Any]) -> bool:
    """Whether the names in a forward reach torch's checkpoint function: bound to it, or by way of its module."""
    if "checkpoint" in used and "checkpoint" not in bound and not used.isdisjoint(("utils", "checkpointing", *CHECKPOINT_MODULES)):
        return True
    for value in (bound[name] for name in used if name in bound):
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if module in CHECKPOINT_MODULES:
            return True
    return False
