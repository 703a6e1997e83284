"""Switch attention, the KV cache, checkpointing, the optimizer's kernels or the batch size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.analysis.treatment_table import FUSABLE
from fp8doctor.examine.checkpointing import huggingface_flag
from fp8doctor.loading.job import Job
from fp8doctor.stacks.torch_private import CHECKPOINTED_CHILD
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, swap
from fp8doctor.trial.variant import Variant


def attention_sdpa(variant: Variant, context: TreatmentContext) -> Variant:
    """Use torch's fused attention; transformers before 4.53 has no switch and reads the configuration."""
    holders: list[Any] = [module for module in variant.model.modules() if "config" in vars(module)]
    eager = [each for each in holders if getattr(each.config, "_attn_implementation", None) == "eager"]
    if not eager:
        raise NotTried("no configuration in it asks for eager attention")
    first = eager[0]
    if not getattr(type(first), "_can_set_attn_implementation", lambda: True)():
        raise NotTried(f"{type(first).__name__} takes its attention when it is built")
    switch = getattr(first, "set_attn_implementation", None)
    if callable(switch):
        try:
            switch("sdpa")
        except (ValueError, ImportError) as error:
            raise NotTried(f"transformers says: {str(error).strip().partition(chr(10))[0]}") from None
    for each in eager:
        each.config._attn_implementation = "sdpa"
    return variant


def cache_off(variant: Variant, context: TreatmentContext) -> Variant:
    if not without_cache(variant.model) and not context.facts.get("training.use_cache"):
        raise NotTried("no configuration in it asks for a cache")
    return variant


def without_cache(model: nn.Module) -> bool:
    found = [vars(module).get("config") for module in model.modules()]
    configs = [config for config in found if config is not None and getattr(config, "use_cache", False)]
    for config in configs:
        config.use_cache = False
    return bool(configs)


def checkpointing_off(variant: Variant, context: TreatmentContext) -> Variant:
    """Remove checkpoint wrappers and clear flags. transformers' KV cache, off meanwhile, stays off."""
    flagged: list[Any] = [module for module in variant.model.modules() if huggingface_flag(module)]
    for module in flagged:
        module.gradient_checkpointing = False
    if flagged:
        without_cache(variant.model)
    found = len(flagged)

    def inside(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal found
        inner: Any = getattr(module, CHECKPOINTED_CHILD, None)
        found += inner is not None
        return inner if inner is None else swap(inner, inside)

    model = swap(variant.model, inside)
    if not found:
        raise NotTried("the model's own code calls checkpoint, which cannot be switched off from outside")
    return replace(variant, model=model)


def fused_optimizer(variant: Variant, context: TreatmentContext) -> Variant:
    if context.job is not None and not could_be_fused(context.job):
        raise NotTried("the optimizer is fused already, or has no fused form")
    return replace(variant, optimizer={**(variant.optimizer or {}), "fused": True, "foreach": None})


def could_be_fused(job: Job) -> bool:
    """Return whether torch can fuse the user's optimizer and does not."""
    optimizer = getattr(job.optimizer, "optimizer", job.optimizer)
    kind = type(optimizer)
    if optimizer is None or kind.__name__ not in FUSABLE or not kind.__module__.startswith("torch.optim"):
        return False
    if not all(each.is_floating_point() for group in optimizer.param_groups for each in group["params"]):
        return False  # complex ones
    return not any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
