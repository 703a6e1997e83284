"""recipe-tensorwise, recipe-rowwise, recipe-rowwise-with-gw-hp: torchao's Float8Linears under another
recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.analysis.treatment_table import recipe_after
from fp8doctor.stacks.lineage import ancestor
from fp8doctor.stacks.torchao import ALL_GATHER_WEIGHT, tensor_class, unwrapped
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def another_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    """Give every Float8Linear another configuration; padding and emulation stay as they were set."""
    config = config_of(recipe_after(context.name))
    layers = [
        module
        for module in variant.model.modules()
        if ancestor(type(module), "torchao.float8.", ("Float8Linear",)) is not None
    ]
    if not layers:
        raise NotTried("it has no Float8Linear of torchao")
    for layer in layers:
        give(layer, config)
    return variant


def config_of(recipe: str) -> Any:
    """Return torchao's configuration for a recipe.

    Raises `NotTried` where torchao cannot be imported or does not know it.
    """
    try:
        from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped]

        return Float8LinearConfig.from_recipe_name(recipe)
    except ImportError as error:
        raise NotTried(f"torchao cannot be imported ({error})") from None
    except ValueError as error:
        raise NotTried(f"this torchao has no recipe {recipe} ({error})") from None


def give(layer: Any, config: Any) -> None:
    """Set on the layer what torchao's constructor makes of ``config``, and nothing else.

    So a class of the user's own is not constructed, and what its user gave it stays. The wrapper of the
    float8 all-gather is taken off, which knows tensorwise scaling only.
    """
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

    config = replace(config, pad_inner_dim=layer.config.pad_inner_dim, emulate=layer.config.emulate)
    fresh = Float8Linear(layer.in_features, layer.out_features, bias=False, device="meta", config=config)
    for name in vars(fresh).keys() - vars(nn.Module()).keys():
        setattr(layer, name, getattr(fresh, name))
    weight = layer._parameters.get("weight")
    if weight is not None and tensor_class(weight) == ALL_GATHER_WEIGHT:
        layer.weight = unwrapped(weight)
