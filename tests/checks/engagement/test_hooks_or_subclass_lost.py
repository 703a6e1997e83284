"""MOD007's lost hooks on models that are converted under watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts
from tests.checks.rules import found_by, outcome_of

LOST = "hooks-or-subclass-lost"


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def convert(model: Any) -> None:
    convert_to_float8_training(model, module_filter_fn=lambda module, name: type(module) is nn.Linear)


def hook(model: Any) -> None:
    model[0].register_forward_hook(lambda module, arguments, output: output)


def compile_forward(model: Any) -> None:
    model[2].forward = torch.compile(model[2].forward)


def wrap(model: Any) -> None:
    model[0] = torch.compile(model[0])


ORDERS = {
    "hooks": ((hook, convert), (convert, hook), "convert-first"),
    "compile": ((compile_forward, convert), (convert, lambda model: model[2].compile()), "convert-first"),
    "wrapper": ((wrap, convert), (convert, wrap), "convert-first"),
    "forward": ((convert_to_float8_training,), (convert,), "keep-subclasses"),
}
"""What a conversion drops -> steps that lose it, steps in the right order, and the fix."""


@pytest.mark.parametrize("lost", ORDERS)
def test_what_the_conversion_drops(look: Callable[..., Facts], lost: str) -> None:
    def after(*steps: Callable[[Any], Any]) -> Facts:
        with ConversionWatch() as watch:
            model = nn.Sequential(nn.Linear(32, 32), Scaled(32, 32), nn.Linear(32, 32))
            for step in steps:
                step(model)
        return look(model, watched=watch)

    wrong, right, treatment = ORDERS[lost]
    finding = found_by(LOST, after(*wrong))
    assert finding.severity == ("error" if lost == "wrapper" else "warning")
    assert lost in finding.title
    assert finding.treatment.name == treatment
    assert outcome_of(LOST, after(*right)) == "silent"
