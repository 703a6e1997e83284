"""Transformer Engine's autocast is opened and gets another recipe from outside, on its stand-in."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.copies.step import Variant
from fp8doctor.trial.treatments.apply import NotTried, TreatmentContext, function_of
from tests.examine.models import Stacked
from tests.stand_ins import transformer_engine as te
from tests.trial.treated import applied, facts

pytestmark = pytest.mark.slow


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
    layers: list[Any] = [variant.model.closed, variant.model.own]
    assert all(layer.fp8 for layer in layers)
    recipes = [type(layer.fp8_meta["recipe"]) for layer in layers]
    assert recipes == [te.DelayedScaling, te.Float8CurrentScaling]
    assert not te.FP8GlobalStateManager.enabled
    with pytest.raises(NotTried, match="no layer of Transformer Engine"):
        applied("te-autocast", Stacked())


def test_an_autocast_around_the_step_gets_another_recipe_and_one_more_change_beside_it_does_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te.install(monkeypatch)
    model = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    context = TreatmentContext(facts(model), "te-current")
    opened = replace(Variant(replicate(model, share=True)[0], None), around=lambda: te.autocast())
    variant = function_of("te-delayed")(opened, replace(context, name="te-delayed"))
    variant = function_of("te-current")(variant, context)  # one after the other, as on top of a plan
    variant = function_of("keep-in-bf16")(variant, replace(context, layers=("1",)))
    for _ in range(2):
        with variant.throughout(), variant.around():
            variant.model(torch.ones(4, 32))
    assert type(variant.model[0].fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]
