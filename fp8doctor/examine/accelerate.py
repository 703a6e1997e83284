"""Accelerate's shared state and what it did to the model, read without creating a state."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from fp8doctor.examine.walk import Tree
from fp8doctor.facts import Accelerate


def examine_accelerate(tree: Tree) -> Accelerate | None:
    """What Accelerate's state says; None when the process has no state, which is also before an Accelerator exists."""
    module = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = dict(getattr(getattr(module, "AcceleratorState", None), "_shared_state", {}))
    process: dict[str, Any] = dict(getattr(getattr(module, "PartialState", None), "_shared_state", {}))
    if not shared and not process:
        return None
    plugin = shared.get("dynamo_plugin")
    return Accelerate(
        mixed_precision=_word(shared.get("_mixed_precision")),
        distributed=_word(shared.get("distributed_type", process.get("distributed_type"))),
        dynamo_backend=_word(getattr(plugin, "backend", None)),
        prepared=is_prepared(tree),
    )


def is_prepared(tree: Tree) -> bool:
    """Whether this model, or a wrapper of it, went through ``Accelerator.prepare``."""
    modules: tuple[nn.Module, ...] = (*tree.root.wrappers, tree.root.module)
    return any(vars(module).get("_is_accelerate_prepared", False) for module in modules)


def _word(value: Any) -> str | None:
    """The value of an enum member, or the text itself."""
    value = getattr(value, "value", value)
    return None if value is None else str(value)
