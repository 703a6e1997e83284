"""te-delayed, te-current, te-block, te-mxfp8: Transformer Engine's layers under another recipe.

Every FP8 autocast that is opened in forward and loss gets the other recipe, whoever opens it: the user's
step, the model's own forward, or Accelerate's wrapper around it. An autocast that switches FP8 off stays as
it is, and ``te.checkpoint`` opens in the backward what the forward had. What cannot be carried out from
outside is not tried: weights kept in FP8 alone have the form of their recipe, FP8 attention would be switched
off with it, operations of ``te.ops`` keep no record that proves the change, and graphs that were captured
replay the recipe of then.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.recipes import BY_TREATMENT
from fp8doctor.stacks.looking import read, state_of
from fp8doctor.stacks.te_private import meta
from fp8doctor.stacks.transformer_engine import recipe_of, recognise
from fp8doctor.trial.state.transformer_engine_state import opened_with
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def another_te_recipe(variant: Variant, context: TreatmentContext) -> Variant:
    """Open every FP8 autocast of forward and loss with the recipe, its settings at their defaults.

    The first forward proves that the layers ran with it, and the second that the first backward, which may
    recompute them, did.
    """
    layers = _layers(variant.model)
    if not layers:
        raise NotTried("the model holds no layer of Transformer Engine that keeps a record of its recipe")
    for each in layers:
        _refuse(each)
    recipe = _recipe(BY_TREATMENT[context.name].classes[0])
    for each in layers:
        each.fp8 = False  # what its next forward sets, so that an older one is not taken for it
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
    """Raise `NotTried` for a layer that does not take another recipe from outside."""
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
    """Raise `NotTried` unless every layer whose last forward ran in FP8 did so with such a recipe.

    A layer keeps the recipe that it has where the new one is equal to it.
    """
    ran = [recipe_of(each) for each in _layers(model) if state_of(each).get("fp8")]
    if not ran:
        raise NotTried("no layer ran under an FP8 autocast that was opened in its step")
    if any(type(each) is not type(recipe) for each in ran):
        raise NotTried(
            "layers ran with a recipe of their own, which is not set by an autocast of the forward"
        )
