"""DST003 on the stand-in for Transformer Engine's layers, in a job of torch's fake process group."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8doctor.facts import Facts
from tests.checks.distributed.sharded import processes
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return stand_in.install(monkeypatch, "quantization")


def trained(
    te: ModuleType, group: Any = None, *, reduce: bool = True, recipe: str = "DelayedScaling"
) -> nn.Module:
    """A layer after a forward in FP8, with what the real one then knows."""
    layer = te.Linear(64, 64)
    chosen = getattr(stand_in, recipe)()
    chosen.reduce_amax = reduce
    with stand_in.autocast(enabled=True, recipe=chosen):
        layer(torch.ones(16, 64))
    layer.fp8_meta["fp8_group"] = group
    return nn.Sequential(layer)


def test_all_ranks_of_the_job(te: ModuleType, look: Look) -> None:
    with processes(16):
        facts = look(trained(te))
    assert facts.training.distributed.amax_ranks == 16
    finding = finding_of("DST003", facts)
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "Delayed scaling reduces its amax over 16 ranks in every forward and backward"


def test_on_one_host_it_is_information(te: ModuleType, look: Look) -> None:
    with processes(8):
        facts = look(trained(te))
    finding = finding_of("DST003", facts)
    assert finding is not None
    assert finding.severity == "info"


def test_a_group_of_its_own_counts(te: ModuleType, look: Look) -> None:
    with processes(16):
        facts = look(trained(te, dist.new_group([0, 1])))
    assert facts.training.distributed.amax_ranks == 2
    finding = finding_of("DST003", facts)
    assert finding is not None
    assert (finding.evidence["amax_ranks"], finding.evidence["world_size"]) == (2, 16)


def test_the_treatments_make_it_silent(te: ModuleType, look: Look) -> None:
    with processes(16):
        own = look(trained(te, reduce=False))
        current = look(trained(te, recipe="Float8CurrentScaling"))
    assert outcome_of("DST003", own).outcome == "healthy"
    assert outcome_of("DST003", current).outcome == "not_applicable"


def test_one_process(te: ModuleType, look: Look) -> None:
    assert outcome_of("DST003", look(trained(te))).outcome == "not_applicable"
