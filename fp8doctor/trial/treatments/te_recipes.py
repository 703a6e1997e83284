"""Run Transformer Engine's layers under its FP8 autocast, or under another recipe."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.recipes import BY_TREATMENT
from fp8doctor.stacks import NoTwin
from fp8doctor.stacks.looking import read, state_of
from fp8doctor.stacks.te_private import autocast_is_open, meta
from fp8doctor.stacks.transformer_engine import STACK, autocast, recipe_of, recognise, within
from fp8doctor.trial.state.transformer_engine_state import opened_with
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def te_autocast(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss under TE's autocast, with TE's default recipe for this GPU.

    A layer opens it again if the model's own code closes it (``te.autocast(enabled=self.fp8)``).
    """
    if not any(linear.stack == STACK for linear in context.facts.network.linears):
        raise NotTried("the model holds no layer of Transformer Engine")
    try:
        opened = autocast()
    except NoTwin as error:
        raise NotTried(str(error)) from None
    outer = variant.around

    @contextmanager
    def around() -> Iterator[None]:
        with outer(), opened(enabled=True):
            yield

    def opened_again() -> AbstractContextManager[Any]:
        return nullcontext() if autocast_is_open() else opened(enabled=True)

    for module in variant.model.modules():
        if recognise(module, {}):
            within(module, opened_again)
    return replace(variant, around=around)


def another_te_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    """Open every FP8 autocast of forward and loss with the recipe at its default settings.

    This covers autocasts of the user's step, of the model's forward and of Accelerate's wrapper. One that
    switches FP8 off stays. ``te.checkpoint`` recomputes under the forward's recipe. Operations of ``te.ops``
    keep no record that proves the change, and captured graphs replay their old recipe, so neither is tried.

    The first forward proves that the layers ran with the recipe. The second proves that the first backward,
    which may recompute them, did.
    """
    layers = _layers(variant.model)
    if not layers:
        raise NotTried("the model holds no layer of Transformer Engine that keeps a record of its recipe")
    for each in layers:
        _refuse(each)
    recipe = _recipe(BY_TREATMENT[context.name].classes[0])
    for each in layers:
        each.fp8 = False  # the next forward sets it, so an older record is not taken for a new one
    outer, opened, steps = variant.around, opened_with(recipe), itertools.count()

    @contextmanager
    def around() -> Iterator[None]:
        number = next(steps)
        if number == 1:
            _prove(variant.model, recipe)
        with opened(), outer():
            yield
        if number == 0:
            _prove(variant.model, recipe)

    return replace(variant, around=around)


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if meta(module) is not None and recognise(module, {})]


def _refuse(layer: nn.Module) -> None:
    """Raise `NotTried` for a layer whose recipe cannot be changed from outside."""
    if read(layer, "primary_weights_in_fp8"):
        raise NotTried("its weights are kept in FP8 alone, in the form of their recipe")
    own = recipe_of(layer)
    if read(own, "fp8_dpa") or read(own, "fp8_mha"):
        raise NotTried("its recipe runs attention in FP8 too, which another recipe would switch off")


def _recipe(kind: str) -> Any:
    made = getattr(sys.modules.get("transformer_engine.common.recipe"), kind, None)
    if made is None:
        raise NotTried(f"this Transformer Engine has no {kind}")
    return made()


def _prove(model: nn.Module, recipe: Any) -> None:
    """Raise `NotTried` unless every layer that ran in FP8 used a recipe of this type.

    A layer keeps its recipe object if the new one is equal to it.
    """
    ran = [recipe_of(each) for each in _layers(model) if state_of(each).get("fp8")]
    if not ran:
        raise NotTried("no layer ran under an FP8 autocast that was opened in its step")
    if any(type(each) is not type(recipe) for each in ran):
        raise NotTried(
            "layers ran with a recipe of their own, which is not set by an autocast of the forward"
        )
