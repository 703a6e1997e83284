"""What trying to save a wrapped weight costs: nothing large is written, and nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.examine import module_facts as saving
from fp8doctor.examine.module_facts import examine_saving
from fp8doctor.examine.walk import walk
from fp8doctor.facts.unrecorded import NOT_RECORDED


def wrapped(*sizes: tuple[int, int]) -> nn.Module:
    """As Accelerate's torchao path converts on one device."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True)
    return convert_to_float8_training(nn.Sequential(*(nn.Linear(*each) for each in sizes)), config=config)


def test_only_the_smallest_is_tried_and_nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped((256, 256), (32, 64), (64, 32))
    gaps: dict[str, str] = {}
    assert [each.tried for each in examine_saving(walk(model), gaps)] == ["1.weight"]
    monkeypatch.setattr(saving, "MOST_BYTES", 32 * 64 * 4 - 1)
    assert examine_saving(walk(model), gaps) is NOT_RECORDED
    assert gaps == {"network.saving": "the smallest WeightWithDynamicFloat8CastTensor is too large to try"}


def test_what_cannot_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view, whose whole storage pickling writes, and a weight without data."""
    view, gaps = wrapped((32, 32)), dict[str, str]()
    view[0].weight._tensor = torch.ones(64, 32)[:32]
    monkeypatch.setattr(saving, "MOST_BYTES", 32 * 32 * 4)
    assert examine_saving(walk(view), {}) is NOT_RECORDED
    with torch.device("meta"):
        empty = wrapped((32, 32))
    assert examine_saving(walk(empty), gaps) is NOT_RECORDED
    assert "has no data (meta device)" in gaps["network.saving"]


def test_trying_changes_nothing() -> None:
    model = wrapped((32, 32))
    weight, state = model[0].weight, torch.get_rng_state()
    before, version = weight._tensor.detach().clone(), weight._tensor._version
    examine_saving(walk(model), {})
    assert model[0].weight is weight
    assert torch.equal(weight._tensor, before)
    assert (weight._tensor._version, weight.requires_grad) == (version, True)
    assert torch.equal(torch.get_rng_state(), state)
