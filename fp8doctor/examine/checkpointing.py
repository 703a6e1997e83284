"""Find activation checkpointing: wrappers, flags, calls."""

import functools
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from fp8doctor.facts import Checkpointing
from fp8doctor.stacks.code_names import from_library, named
from fp8doctor.stacks.looking import forward_of, is_a, lineage, modules_of, read, read_class, state_of
from fp8doctor.stacks.torch_private import CHECKPOINT_WRAPPERS

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
