"""A layer that a recipe keeps out of the autocast has no shape that FP8 would mind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8doctor import inspect_model
from tests.stand_ins import transformer_engine as te


class Classifier(nn.Module):
    """Eight layers and a head for ten classes, which is outside of the autocast or within it."""

    def __init__(self, head_in_fp8: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(*(te.Linear(32, 32) for _ in range(8)))
        self.head, self.head_in_fp8 = te.Linear(32, 10), head_in_fp8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=te.DelayedScaling()):
            x = self.body(x)
        with te.autocast(enabled=self.head_in_fp8, recipe=te.DelayedScaling()):
            return self.head(x)


@pytest.mark.parametrize("head_in_fp8", [True, False])
def test_only_what_runs_in_fp8_is_held_to_its_sides(
    monkeypatch: pytest.MonkeyPatch, head_in_fp8: bool
) -> None:
    te.install(monkeypatch)
    model, batch = Classifier(head_in_fp8).bfloat16(), torch.ones(16, 32, dtype=torch.bfloat16)
    model(batch)
    found = {each.code for each in inspect_model(model, batch, trial=False).findings}
    assert ("SHP001" in found) is head_in_fp8
    assert ("MOD002" in found) is not head_in_fp8
