"""cache-off: no KV cache in training."""

from __future__ import annotations

from fp8doctor.trial.treatments.registry import Case, NotTried, treatment
from fp8doctor.trial.variant import Variant


@treatment("cache-off")
def cache_off(variant: Variant, case: Case) -> Variant:
    """``use_cache = False`` in every configuration of the model."""
    found = [vars(module).get("config") for module in variant.model.modules()]
    configs = [config for config in found if config is not None and getattr(config, "use_cache", False)]
    if not configs:
        raise NotTried("no configuration in it asks for a cache")
    for config in configs:
        config.use_cache = False
    return variant
