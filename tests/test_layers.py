"""`inspect_model(layers=N)`: the report is about a copy with so many blocks, and says so."""

from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model
from tests.examine.models import Stacked, llama


@pytest.mark.slow
def test_the_copy_is_inspected_and_named_and_the_model_stays() -> None:
    model = convert_to_float8_training(Stacked())
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: id(module) for name, module in model.named_modules()}
    report = inspect_model(model, optimizer=optimizer, layers=2, trial=False)
    assert report.facts.target.name == "Stacked cut to 2 of 3 blocks"
    assert [blocks.count for blocks in report.facts.network.blocks] == [2]
    assert report.facts.training.parameters_outside_optimizer == 0
    assert {name: id(module) for name, module in model.named_modules()} == before


@pytest.mark.slow
def test_the_cut_is_what_is_timed() -> None:
    model = Stacked().bfloat16()
    trial = inspect_model(
        model, torch.arange(32).reshape(2, 16), layers=2, device="cpu", budget_s=0.01
    ).facts.trial
    assert trial.blocks == {}
    assert trial.arms[0].tried


def test_a_model_that_is_short_enough_is_not_cut() -> None:
    assert inspect_model(Stacked(), layers=3, trial=False).facts.target.name == "Stacked"


@pytest.mark.parametrize(
    ("model", "layers", "sentence"),
    [
        (llama(), 0, "layers has to be a whole number of blocks, 1 or more, not 0"),
        (llama(), True, "layers has to be a whole number"),
        (nn.Linear(32, 32), 4, "layers=4, and the model has no list of repeated blocks to cut"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_sentence(model: nn.Module, layers: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        inspect_model(model, layers=layers, trial=False)
