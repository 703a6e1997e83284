"""Accelerate's shared state and what it did to the model, read without creating a state."""

from __future__ import annotations

import gc
import sys
from typing import Any

from msgspec.structs import replace
from torch import nn

from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.walk import Tree
from fp8doctor.facts import Accelerate
from fp8doctor.stacks.looking import read, state_of


def examine_accelerate(tree: Tree | None) -> Accelerate | None:
    """Read Accelerate's state; None without one, as before an Accelerator exists. Without a tree nothing is
    told of a model."""
    module = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = dict(getattr(getattr(module, "AcceleratorState", None), "_shared_state", {}))
    process: dict[str, Any] = dict(getattr(getattr(module, "PartialState", None), "_shared_state", {}))
    if not shared and not process:
        return None
    state = Accelerate(
        mixed_precision=_word(shared.get("_mixed_precision")),
        distributed=_word(shared.get("distributed_type", process.get("distributed_type"))),
        may_prepare=accelerator_waits(),
    )
    if tree is None:
        return state
    return replace(state, prepared=is_prepared(tree), te_autocast=runs_te_autocast(tree))


def is_prepared(tree: Tree) -> bool:
    """Whether this model, or a wrapper of it, went through ``Accelerator.prepare``."""
    return any(state_of(module).get("_is_accelerate_prepared", False) for module in _wrapped_and_root(tree))


def accelerator_waits() -> bool:
    """Whether an Accelerator is alive that has prepared no model, which its state does not tell."""
    kind = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if kind is None:
        return False
    return any(issubclass(type(each), kind) and not vars(each).get("_models") for each in gc.get_objects())


def runs_te_autocast(tree: Tree) -> bool:
    """Whether a forward goes through ``contextual_fp8_autocast`` (1.0 to 1.15): the model's own, or under DDP
    and FSDP the wrapper's."""
    forwards = (state_of(module).get("forward") for module in _wrapped_and_root(tree))
    codes = (read(link, "__code__") for forward in forwards for link in chain(forward))
    return any(
        code is not None and code.co_qualname == "contextual_fp8_autocast.<locals>.forward" for code in codes
    )


def _wrapped_and_root(tree: Tree) -> tuple[nn.Module, ...]:
    return (*tree.root.wrappers, tree.root.module)


def _word(value: Any) -> str | None:
    """Read the value of an enum member, or the text itself."""
    value = getattr(value, "value", value)
    return None if value is None else str(value)
