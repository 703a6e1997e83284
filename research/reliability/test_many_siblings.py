"""What an examination costs grows with the number of the Linears, also where thousands stand in one list."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.examine.linears import describe, find_layers
from fp8doctor.examine.walk import walk


def a_list(many: int, out: int = 8) -> nn.Module:
    return nn.ModuleList([nn.Linear(8, out) for _ in range(many)])


BUILDS: dict[str, Callable[[int], nn.Module]] = {
    "a list": lambda many: nn.ModuleDict({"many": a_list(many)}),
    "attributes": lambda many: nn.ModuleDict({f"layer{at}": nn.Linear(8, 8) for at in range(many)}),
    "gates": lambda many: nn.ModuleDict({f"{at}_gate": nn.Linear(8, 8) for at in range(many)}),
    "experts": lambda many: nn.ModuleDict({"gate": nn.Linear(8, many), "experts": a_list(many)}),
    "blocks": lambda many: nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(many)]),
    "heads": lambda many: nn.ModuleDict({"body": nn.Conv2d(3, 8, 3), "many": a_list(many, out=5)}),
}


def calls(model: nn.Module) -> int:
    """Calls that looking at all layers makes, of Python's functions and of C's."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        tree = walk(model)
        describe(find_layers(tree, {}), tree, None, None, (), {})
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_five_times_the_siblings_cost_at_most_six_times_as_much(build: Callable[[int], nn.Module]) -> None:
    with torch.device("meta"):
        few, many = build(60), build(300)
    calls(few)  # what is looked up once, of torch and of each class
    assert calls(many) <= 6 * calls(few)
