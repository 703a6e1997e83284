"""Convert a model with torchao, change a recipe (torchao, Transformer Engine), or open TE's autocast."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.analysis.layers import FP8_MULTIPLE, converted
from fp8doctor.recipes import BY_TREATMENT
from fp8doctor.stacks import is_fp8, transformer_engine
from fp8doctor.stacks.looking import ancestor, read, state_of
from fp8doctor.stacks.torch_private import Unknown
from fp8doctor.stacks.torchao import ALL_GATHER_WEIGHT, tensor_class, unwrapped
from fp8doctor.stacks.transformer_engine import STACK, autocast, autocast_is_open, meta, recipe_of, within
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.step import Variant
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext


def another_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    named = ("Float8Linear",)
    layers = [each for each in variant.model.modules() if ancestor(type(each), "torchao.float8.", named)]
    if not layers:
        raise NotTried("it has no Float8Linear of torchao")
    config = config_of(BY_TREATMENT[context.name].name)
    for layer in layers:
        give(layer, config)
    return variant


def config_of(recipe: str) -> Any:
    """Return torchao's configuration for a recipe."""
    try:
        from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped]

        return Float8LinearConfig.from_recipe_name(recipe)
    except (ImportError, ValueError, AssertionError) as error:  # torchao asserts its names
        raise NotTried(f"this torchao has no recipe {recipe} ({error})") from None


def give(layer: Any, config: Any) -> None:
    """Set only the attributes that torchao's constructor derives from ``config``: a subclass keeps its own.

    The float8 all-gather wrapper is removed, because it supports only tensorwise scaling.
    """
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]

    config = replace(config, pad_inner_dim=layer.config.pad_inner_dim, emulate=layer.config.emulate)
    fresh = Float8Linear(layer.in_features, layer.out_features, bias=False, device="meta", config=config)
    for name in vars(fresh).keys() - vars(nn.Module()).keys():
        setattr(layer, name, getattr(fresh, name))
    weight = layer._parameters.get("weight")
    if weight is not None and tensor_class(weight) == ALL_GATHER_WEIGHT:
        layer.weight = unwrapped(weight)


def convert(variant: Variant, context: TreatmentContext) -> Variant:
    """Convert what a conversion should take with torchao's recipe."""
    config = config_of(context.name.removeprefix("convert-"))
    from torchao.float8 import convert_to_float8_training

    skip = {each.name for each in context.facts.network.linears}
    skip -= {each.name for each in converted(context.facts)}

    def wanted(module: Any, name: str) -> bool:
        return cleaned(name) not in skip and all(size % FP8_MULTIPLE == 0 for size in module.weight.shape)

    model = convert_to_float8_training(variant.model, config=config, module_filter_fn=wanted)
    if not any(map(is_fp8, model.modules())):
        raise NotTried("it has no nn.Linear that torchao could convert")
    return replace(variant, model=model)


def te_autocast(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss under TE's autocast; a layer opens it again if the model's own code closes it."""
    if not any(linear.stack == STACK for linear in context.facts.network.linears):
        raise NotTried("the model holds no layer of Transformer Engine")
    opened = autocast()

    def opened_again() -> AbstractContextManager[Any]:
        return nullcontext() if autocast_is_open() else opened(enabled=True)

    for module in variant.model.modules():
        if transformer_engine.recognise(module, {}):
            within(module, opened_again)

    @contextmanager
    def around() -> Iterator[None]:
        with variant.around(), opened(enabled=True):
            yield

    return replace(variant, around=around)


def another_te_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    """Open every FP8 autocast of the step with the recipe at its default settings.

    One that switches FP8 off stays. Operations of ``te.ops`` keep no record that proves the change, and
    captured graphs replay their old recipe, so neither is tried. The first step proves that the layers ran
    with the recipe, in a backward that recomputes them too.
    """
    layers: list[Any] = [
        module
        for module in variant.model.modules()
        if meta(module) is not None and transformer_engine.recognise(module, {})
    ]
    if not layers:
        raise NotTried("the model holds no layer of Transformer Engine that keeps a record of its recipe")
    for layer in layers:
        if read(layer, "primary_weights_in_fp8"):
            raise NotTried("its weights are kept in FP8 alone, in the form of their recipe")
        if transformer_engine.record_of(layer, {})["features"].get("fp8_attention"):
            raise NotTried("its recipe runs attention in FP8 too, which another recipe would switch off")
        layer.fp8 = False  # the next forward sets it, so an older record is not taken for a new one
    kind = BY_TREATMENT[context.name].classes[0]
    made = getattr(sys.modules.get("transformer_engine.common.recipe"), kind, None)
    if made is None:
        raise NotTried(f"this Transformer Engine has no {kind}")
    recipe = made()
    opened, steps = _opened_with(recipe), itertools.count()

    @contextmanager
    def proved() -> Iterator[None]:
        with opened():
            yield
        if next(steps) == 0:
            _prove(layers, recipe)

    return replace(variant, throughout=proved)


def _opened_with(recipe: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which every FP8 autocast opens with this recipe: one function, compiled once."""
    manager = transformer_engine.state_manager()
    names = [name for name in transformer_engine.ENTERS if name in vars(manager or type)]
    if not names:
        raise Unknown("Transformer Engine opens its autocast in another way")
    name, supported = names[0], transformer_engine.recipe_test()
    own = vars(manager)[name]

    def enter(
        cls: Any, /, enabled: bool = False, calibrating: bool = False, fp8_recipe: Any = None, **more: Any
    ) -> None:
        if enabled and supported is not None:
            supported(recipe)
        own.__func__(cls, enabled, calibrating, recipe if enabled else fp8_recipe, **more)

    given = classmethod(enter)

    @contextmanager
    def opened() -> Iterator[None]:
        setattr(manager, name, given)
        try:
            yield
        finally:
            setattr(manager, name, own)

    return opened


def _prove(layers: Iterable[Any], recipe: Any) -> None:
    """Raise `NotTried` unless every layer that ran in FP8 used a recipe of this type."""
    ran = [recipe_of(each) for each in layers if state_of(each).get("fp8")]
    if not ran:
        raise NotTried("no layer ran under an FP8 autocast that was opened in its step")
    if any(type(each) is not type(recipe) for each in ran):
        raise NotTried(
            "layers ran with a recipe of their own, which is not set by an autocast of the forward"
        )
