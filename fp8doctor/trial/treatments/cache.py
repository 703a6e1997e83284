"""cache-off: no KV cache in training."""

from __future__ import annotations

from torch import nn

from fp8doctor.facts import recorded
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def cache_off(variant: Variant, context: TreatmentContext) -> Variant:
    """Set ``use_cache = False`` in every configuration of the model; another treatment may have done it
    already."""
    caches = recorded(context.facts, "training.use_cache") and context.facts.training.use_cache
    if not without_cache(variant.model) and not caches:
        raise NotTried("no configuration in it asks for a cache")
    return variant


def without_cache(model: nn.Module) -> bool:
    """Switch the cache off in every configuration; return whether one had asked for it."""
    found = [vars(module).get("config") for module in model.modules()]
    configs = [config for config in found if config is not None and getattr(config, "use_cache", False)]
    for config in configs:
        config.use_cache = False
    return bool(configs)
