"""recipe-tensorwise, recipe-rowwise, recipe-rowwise-with-gw-hp: torchao's Float8Linears under another
recipe."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.analysis.treatment_table import TORCHAO_RECIPES, recipe_after, recipe_change
from fp8doctor.stacks.lineage import ancestor
from fp8doctor.stacks.torchao import plain_linear
from fp8doctor.trial.copies.compiling import context_of
from fp8doctor.trial.copies.replica import rebind
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, carries_out, swap
from fp8doctor.trial.variant import Variant


@carries_out(*map(recipe_change, TORCHAO_RECIPES))
def another_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    """Give every Float8Linear another configuration; padding and emulation stay as they were set."""
    config = config_of(recipe_after(context.name))
    found = 0

    def converted(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal found
        if ancestor(type(module), "torchao.float8.", ("Float8Linear",)) is None:
            return None
        found += 1
        return with_recipe(module, config)

    model = swap(variant.model, converted)
    if not found:
        raise NotTried("it has no Float8Linear of torchao")
    return replace(variant, model=model)


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


def with_recipe(module: Any, config: Any) -> nn.Module:
    """Copy the layer under ``config``: what torchao's constructor makes of that, and all else as it was.

    So a class of the user's own is not constructed, and keeps what its user gave it after the conversion. The
    wrapper of the float8 all-gather is taken off, which knows tensorwise scaling only.
    """
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

    config = replace(config, pad_inner_dim=module.config.pad_inner_dim, emulate=module.config.emulate)
    fresh = Float8Linear.from_float(plain_linear(module), config=config)
    new: nn.Module = copy.copy(module)
    for name, value in vars(fresh).items():
        if name.startswith("_"):
            vars(new)[name] = copy.copy(vars(module)[name])
        elif name != "training":
            vars(new)[name] = value
    new.weight = fresh.weight
    if (forward := vars(new).pop("forward", None)) is not None and context_of(forward) is None:
        vars(new)["forward"] = rebind(forward, {id(module): new})
    return new
