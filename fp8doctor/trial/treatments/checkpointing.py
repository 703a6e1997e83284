"""checkpointing-off: activations kept instead of computed again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.examine.checkpointing import huggingface_flag, is_composable, names_checkpoint, whole_forward
from fp8doctor.facts import Facts, recorded
from fp8doctor.stacks.looking import forward_of, read
from fp8doctor.stacks.torch_private import CHECKPOINTED_CHILD
from fp8doctor.trial.treatments.cache import without_cache
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, swap
from fp8doctor.trial.variant import Variant


def checkpointing_off(variant: Variant, context: TreatmentContext) -> Variant:
    """Take checkpoint wrappers and hooks off and clear flags. A call inside a forward that no flag asks for
    stays."""
    return replace(variant, model=keep_activations(variant.model, flags(context.facts)))


def flags(facts: Facts) -> frozenset[str]:
    """Name the attributes that were seen to ask for a call of checkpoint in a forward."""
    return frozenset(
        each.flag for each in facts.training.checkpointing if recorded(each, "flag") and each.flag
    )


def keep_activations(model: nn.Module, asking: Collection[str] = ()) -> nn.Module:
    """Take off the checkpointing that is switched from outside; transformers' KV cache, which that kept off,
    stays off."""
    found = 0
    for module in model.modules():
        if huggingface_flag(module):
            module.gradient_checkpointing = False  # type: ignore[assignment]
            found += 1
    if found:
        without_cache(model)
    found += sum(_switched_off(module, asking) for module in model.modules())

    def inside(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal found
        inner: Any = getattr(module, CHECKPOINTED_CHILD, None)
        found += inner is not None
        return inner if inner is None else swap(inner, inside)

    model = swap(model, inside)
    if not found:
        raise NotTried("the model's own code calls checkpoint, which cannot be switched off from outside")
    return model


def _switched_off(module: nn.Module, asking: Collection[str]) -> bool:
    """Whether a flag, torch's hooks or an assigned forward asked for checkpointing here, and no longer do."""
    if whole_forward(module):
        module.forward = module.forward.args[0]  # type: ignore[attr-defined]
        return True
    hooks = [
        (held, key)
        for held in (module._forward_pre_hooks, module._forward_hooks)
        for key, hook in held.items()
        if is_composable(hook)
    ]
    if hooks:
        for held, key in hooks:
            del held[key]
        return True
    on = [name for name in asking if read(module, name) is True]
    if not on or not names_checkpoint(forward_of(module), type(module)):
        return False
    for name in on:
        setattr(module, name, False)
    return True
