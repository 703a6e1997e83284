"""Transformer Engine's autocast is opened and gets another recipe from outside, on its stand-in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from torch import nn

from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, function_of
from fp8doctor.trial.variant import Variant
from tests.examine.models import Stacked
from tests.stand_ins import transformer_engine as te
from tests.trial.treated import applied, facts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_te_layers_run_under_the_autocast(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch, flavour)
    model = nn.Sequential(te.Linear(32, 32))
    variant = applied("te-autocast", model)
    with variant.around():
        variant.model(torch.ones(4, 32))
    assert variant.model[0].fp8  # type: ignore[index]
    assert not te.FP8GlobalStateManager.enabled
    with pytest.raises(NotTried, match="no layer of Transformer Engine"):
        applied("te-autocast", Stacked())


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_an_autocast_that_the_model_closes_is_opened_again_and_one_that_it_opens_is_left(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch, flavour)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.closed, self.own = te.Linear(32, 32), te.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=False):
                x = self.closed(x)
            with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
                return self.own(x)

    variant = applied("te-autocast", Model())
    with variant.around():
        variant.model(torch.ones(4, 32))
    closed, own = variant.model.closed, variant.model.own
    assert closed.fp8
    assert own.fp8
    assert (type(closed.fp8_meta["recipe"]), type(own.fp8_meta["recipe"])) == (
        te.DelayedScaling,
        te.Float8CurrentScaling,
    )  # type: ignore[union-attr]
    assert not te.FP8GlobalStateManager.enabled


def with_own_autocast(layer: Callable[[], Any] = lambda: te.Linear(32, 32)) -> nn.Module:
    """A model whose forward opens the autocast, with current scaling, and closes it for its last layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.closed = layer(), te.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
                x = self.own(x)
                with te.autocast(enabled=False):
                    return self.closed(x)

    model = Model()
    model(torch.ones(4, 32))
    return model


def step_of(variant: Variant) -> None:
    with variant.around():
        variant.model(torch.ones(4, 32))


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
@pytest.mark.parametrize(
    ("name", "kind"), [("te-delayed", te.DelayedScaling), ("te-block", te.Float8BlockScaling)]
)
def test_an_autocast_that_the_model_opens_gets_another_recipe_and_one_that_it_closes_stays_closed(
    name: str, kind: type, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch, flavour)
    model = with_own_autocast()
    before = dict(vars(te.FP8GlobalStateManager))
    variant = applied(name, model)
    for _ in range(3):
        step_of(variant)
    own, closed = variant.model.own, variant.model.closed
    assert (own.fp8, closed.fp8) == (True, False)
    assert type(own.fp8_meta["recipe"]) is kind  # type: ignore[index]
    assert dict(vars(te.FP8GlobalStateManager)) == before
    model(torch.ones(4, 32))
    assert type(model.own.fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]


def test_an_autocast_around_the_step_gets_another_recipe_and_one_more_change_beside_it_does_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te.install(monkeypatch)
    model = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    context = TreatmentContext(facts(model), "te-current")
    opened = replace(Variant(replicate(model, share=True)[0], None), around=lambda: te.autocast())
    variant = function_of("te-current")(opened, context)
    variant = function_of("keep-in-bf16")(variant, replace(context, layers=("1",)))
    step_of(variant)
    step_of(variant)
    assert type(variant.model[0].fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]


def test_accelerates_wrapper_gets_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    library = te.install(monkeypatch)
    library.fp8_autocast = lambda enabled, fp8_recipe: te.autocast(enabled, fp8_recipe)  # type: ignore[attr-defined]
    model = nn.Sequential(te.Linear(32, 32))
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    wrapped = contextual_fp8_autocast(model.forward, te.DelayedScaling())
    model.forward = MethodType(wrapped, model)  # type: ignore[method-assign]
    variant = applied("te-current", model)
    step_of(variant)
    assert type(variant.model[0].fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]


def kept_in_fp8() -> te.Linear:
    layer = te.Linear(32, 32)
    layer.primary_weights_in_fp8 = True
    return layer


def captured() -> te.Linear:
    """A layer whose forward is the replay of a graph, which sets nothing."""
    layer = te.Linear(32, 32)
    layer.__dict__["forward"] = lambda x: x
    return layer


def with_fp8_attention() -> te.Linear:
    layer = te.Linear(32, 32)
    layer.fp8_meta["recipe"] = te.DelayedScaling()
    layer.fp8_meta["recipe"].fp8_dpa = True
    return layer


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (kept_in_fp8, "kept in FP8 alone"),
        (with_fp8_attention, "runs attention in FP8 too"),
        (captured, "no layer ran under an FP8 autocast"),
        (lambda: nn.Linear(32, 32), "no layer of Transformer Engine"),
        (lambda: te.OperationGroupedLinear(2, 32, 32), "no layer of Transformer Engine"),
        (lambda: te.Linear(32, 32), "no layer ran under an FP8 autocast"),
    ],
    ids=["weights in FP8", "FP8 attention", "captured", "torch", "te.ops", "no autocast"],
)
def test_a_recipe_that_cannot_be_set_from_outside_is_not_tried(
    build: Callable[[], nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    with pytest.raises(NotTried, match=reason):
        step_of(applied("te-current", nn.Sequential(build())))


def test_a_backward_that_brings_the_old_recipe_back_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    variant = applied("te-delayed", with_own_autocast())
    step_of(variant)
    with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
        variant.model.own(torch.ones(4, 32))  # type: ignore[operator]
    with pytest.raises(NotTried, match="a recipe of their own"):
        step_of(variant)


def test_a_recipe_that_this_version_does_not_have_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    monkeypatch.delattr(sys.modules["transformer_engine.common.recipe"], "Float8BlockScaling")
    with pytest.raises(NotTried, match="this Transformer Engine has no Float8BlockScaling"):
        applied("te-block", with_own_autocast())


def test_the_library_refuses_the_recipe_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)

    def check_recipe_support(recipe: Any) -> None:
        if isinstance(recipe, te.MXFP8BlockScaling):
            raise RuntimeError("Device compute capability 10.0 or higher required for MXFP8 execution.")

    monkeypatch.setattr(te, "check_recipe_support", check_recipe_support, raising=False)
    variant = applied("te-mxfp8", with_own_autocast())
    with pytest.raises(RuntimeError, match="or higher required"):
        step_of(variant)
    step_of(applied("te-delayed", with_own_autocast()))
