"""attention-sdpa: torch's fused attention instead of transformers' eager one."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def attention_sdpa(variant: Variant, context: TreatmentContext) -> Variant:
    """Set transformers' own switch where it has one (4.53 on), else what its attention reads at every
    call."""
    eager = [module for module in variant.model.modules() if is_eager(module)]
    if not eager:
        raise NotTried("no configuration in it asks for eager attention")
    if not getattr(type(eager[0]), "_can_set_attn_implementation", lambda: True)():
        raise NotTried(f"{type(eager[0]).__name__} takes its attention when it is built")
    switch = getattr(eager[0], "set_attn_implementation", None)
    if callable(switch):
        try:
            switch("sdpa")
        except (ValueError, ImportError) as error:
            raise NotTried(f"transformers says: {str(error).strip().partition(chr(10))[0]}") from None
    for module in eager:
        module.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    return variant


def is_eager(module: Any) -> bool:
    """Whether this module's transformers configuration asks for eager attention."""
    return (
        isinstance(module, nn.Module)
        and getattr(vars(module).get("config"), "_attn_implementation", None) == "eager"
    )
