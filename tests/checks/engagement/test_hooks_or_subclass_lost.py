"""MOD007's lost hooks on models that are converted under watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts
from tests.checks.rules import finding_of


def hook(model: Any) -> None:
    model[0].register_forward_hook(lambda module, arguments, output: output)


@pytest.mark.parametrize("in_order", [False, True])
def test_hooks_that_the_conversion_drops(look: Callable[..., Facts], in_order: bool) -> None:
    steps = [hook, convert_to_float8_training]
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        for step in reversed(steps) if in_order else steps:
            step(model)
    finding = finding_of("hooks-or-subclass-lost", look(model, watched=watch))
    assert (finding is None) == in_order
    assert finding is None or finding.treatment.name == "convert-first"
