"""Convert a model by torchao (`convert-*`), or give its Float8Linears another recipe (`recipe-*`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from fp8doctor.analysis.layers import FP8_MULTIPLE
from fp8doctor.facts import Facts
from fp8doctor.recipes import BY_TREATMENT, Recipe
from fp8doctor.stacks import recognise
from fp8doctor.stacks.lineage import ancestor
from fp8doctor.stacks.torchao import ALL_GATHER_WEIGHT, plain_linear, tensor_class, unwrapped
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, swap
from fp8doctor.trial.variant import Variant


def another_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    """Give every Float8Linear another configuration; keep its padding and emulation."""
    recipe = BY_TREATMENT[context.name]
    layers = [module for module in variant.model.modules() if is_float8_linear(module)]
    if not layers:
        raise NotTried("it has no Float8Linear of torchao")
    if recipe.granularity == "block":
        return replace(variant, model=to_mxfp8(variant.model, recipe))
    config = config_of(recipe.name)
    for layer in layers:
        give(layer, config)
    return variant


def is_float8_linear(module: nn.Module) -> bool:
    """Whether a module is torchao's Float8Linear, or of a class derived from it."""
    return ancestor(type(module), "torchao.float8.", ("Float8Linear",)) is not None


def to_mxfp8(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Put every aligned Float8Linear without a bias in MXFP8; the others stay, because MXFP8 drops a bias."""
    try:
        from torchao.prototype.moe_training.config import (  # type: ignore[import-untyped]
            MXFP8TrainingOpConfig,
            MXFP8TrainingRecipe,
        )
        from torchao.quantization import quantize_  # type: ignore[import-untyped]
    except ImportError as error:
        raise NotTried(f"this torchao has no MXFP8 training: {error}") from None
    made: list[nn.Module] = []

    def plain(name: str, module: nn.Module) -> nn.Module | None:
        if not is_float8_linear(module) or not takes(module, recipe):
            return None
        made.append(plain_linear(module).train(module.training))
        return made[-1]

    model = swap(model, plain)
    if not made:
        raise NotTried("it has no Float8Linear without a bias whose sides MXFP8 takes")
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)
    quantize_(model, config, filter_fn=lambda module, name: any(module is each for each in made))
    return model


def takes(layer: Any, recipe: Recipe) -> bool:
    """Whether a recipe takes a layer as it is: its bias and both sides of its weight."""
    fits = all(size % recipe.multiple == 0 for size in layer.weight.shape)
    return fits and not (recipe.drops_bias and layer.bias is not None)


def config_of(recipe: str) -> Any:
    """Return torchao's configuration for a recipe.

    Raises `NotTried` if torchao cannot be imported or does not know it.
    """
    try:
        from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped]

        return Float8LinearConfig.from_recipe_name(recipe)
    except ImportError as error:
        raise NotTried(f"torchao cannot be imported ({error})") from None
    except ValueError as error:
        raise NotTried(f"this torchao has no recipe {recipe} ({error})") from None


def give(layer: Any, config: Any) -> None:
    """Set only the attributes that torchao's constructor derives from ``config``.

    A subclass is not constructed again, and keeps what its user set. The float8 all-gather wrapper is
    removed, because it supports only tensorwise scaling.
    """
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

    config = replace(config, pad_inner_dim=layer.config.pad_inner_dim, emulate=layer.config.emulate)
    fresh = Float8Linear(layer.in_features, layer.out_features, bias=False, device="meta", config=config)
    for name in vars(fresh).keys() - vars(nn.Module()).keys():
        setattr(layer, name, getattr(fresh, name))
    weight = layer._parameters.get("weight")
    if weight is not None and tensor_class(weight) == ALL_GATHER_WEIGHT:
        layer.weight = unwrapped(weight)


PREFIX = "convert-"


def convert(variant: Variant, context: TreatmentContext) -> Variant:
    """Convert every Linear except heads, routers and adapters."""
    return replace(
        variant,
        model=to_float8(
            variant.model, recipe=context.name.removeprefix(PREFIX), skip=not_in_fp8(context.facts)
        ),
    )


def not_in_fp8(facts: Facts) -> tuple[str, ...]:
    """Name the Linears that a conversion leaves out."""
    return tuple(
        linear.name
        for linear in facts.network.linears
        if linear.role != "body" or linear.adapter == "adapter"
    )


def to_float8(model: nn.Module, recipe: str, skip: Sequence[str] = ()) -> nn.Module:
    """Convert every aligned nn.Linear with torchao's ``recipe``, except the layers in ``skip``."""
    config = config_of(recipe)
    from torchao.float8 import convert_to_float8_training

    def wanted(module: nn.Module, name: str) -> bool:
        return cleaned(name) not in skip and all(size % FP8_MULTIPLE == 0 for size in module.weight.shape)  # type: ignore[union-attr]

    converted = cast(nn.Module, convert_to_float8_training(model, config=config, module_filter_fn=wanted))
    if not any(layer.use == "training" for module in converted.modules() for layer in recognise(module, {})):
        raise NotTried("it has no nn.Linear that torchao could convert")
    return converted
