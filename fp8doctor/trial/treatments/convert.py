"""convert-tensorwise, convert-rowwise: a model without FP8 converted by torchao."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import nn

from fp8doctor.analysis.layers import FP8_MULTIPLE
from fp8doctor.facts import Facts
from fp8doctor.stacks import recognise
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.treatments.recipe import config_of
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant

PREFIX = "convert-"


def convert(variant: Variant, context: TreatmentContext) -> Variant:
    """Convert every Linear but heads, routers and adapters."""
    return replace(
        variant,
        model=to_float8(
            variant.model, recipe=context.name.removeprefix(PREFIX), skip=not_in_fp8(context.facts)
        ),
    )


def not_in_fp8(facts: Facts) -> tuple[str, ...]:
    """List the Linears that a conversion leaves out."""
    return tuple(
        linear.name
        for linear in facts.network.linears
        if linear.role != "body" or linear.adapter == "adapter"
    )


def to_float8(model: nn.Module, recipe: str, skip: Sequence[str] = ()) -> nn.Module:
    """Convert every aligned nn.Linear by torchao with ``recipe``, but the layers named in ``skip``."""
    config = config_of(recipe)
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-untyped]

    def wanted(module: nn.Module, name: str) -> bool:
        return cleaned(name) not in skip and all(size % FP8_MULTIPLE == 0 for size in module.weight.shape)  # type: ignore[union-attr]

    converted = cast(nn.Module, convert_to_float8_training(model, config=config, module_filter_fn=wanted))
    if not any(layer.use == "training" for module in converted.modules() for layer in recognise(module, {})):
        raise NotTried("it has no nn.Linear that torchao could convert")
    return converted
