"""checkpointing-off: activations kept instead of computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.examine.checkpoint_calls import called_checkpoint
from fp8doctor.examine.checkpointing import huggingface_flag, is_composable, whole_forward
from fp8doctor.trial.treatments.cache import without_cache
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, swap
from fp8doctor.trial.variant import Variant


def checkpointing_off(variant: Variant, context: TreatmentContext) -> Variant:
    """Take checkpoint wrappers and hooks off and clear flags. A call inside a forward that no flag asks for
    stays."""
    return replace(variant, model=keep_activations(variant.model))


def keep_activations(model: nn.Module) -> nn.Module:
    """Take off the checkpointing that is switched from outside; transformers' KV cache, which that kept off,
    stays off."""
    found = 0
    for module in model.modules():
        if huggingface_flag(module):
            module.gradient_checkpointing = False  # type: ignore[assignment]
            found += 1
    if found:
        without_cache(model)
    found += sum(map(_switched_off, model.modules()))

    def inside(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal found
        inner: Any = getattr(module, "_checkpoint_wrapped_module", None)
        found += inner is not None
        return inner if inner is None else swap(inner, inside)

    model = swap(model, inside)
    if not found:
        raise NotTried("the model's own code calls checkpoint, which cannot be switched off from outside")
    return model


def _switched_off(module: nn.Module) -> bool:
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
    called = called_checkpoint(module)
    if called is None or called.flag is None:
        return False
    setattr(module, called.flag, False)
    return True
