"""A watched step shows what the worker's forward on fake tensors shows: checkpointing, autocasts and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.facts import Facts, recorded
from fp8doctor.running.observer import ScriptObserver
from fp8doctor.trial.layers.seen_calls import IN_COMPILED_CODE
from tests.examine.models import called
from tests.examine.test_autocasts import Opening
from tests.examine.test_checkpoint_calls import BATCH, OFF, ON, LikeTimm, Stack, flagged
from tests.running.conftest import STEPS, WARMUP, Heard
from tests.stand_ins import transformer_engine as te


def trained(model: Any, call: Callable[..., Any] | None = None, width: int = 16) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(WARMUP + STEPS):
        (call or model)(torch.ones(2, width)).sum().backward()
        optimizer.step()


def told(facts: Facts) -> Any:
    marks = [(each.name, each.form, each.active, each.reentrant) for each in facts.training.checkpointing]
    layers = {each.name: each.checkpointed for each in facts.linears()}
    return marks, layers, [each.checkpointed for each in facts.network.blocks]


@pytest.mark.parametrize("build", [*ON.values(), *OFF.values()], ids=[*ON, *(f"{each}, off" for each in OFF)])
def test_checkpointing(build: Callable[[], nn.Module], observer: ScriptObserver, heard: Heard) -> None:
    trained(build())
    assert told(heard.facts) == told(called(build(), BATCH))


def test_rows(observer: ScriptObserver, heard: Heard) -> None:
    model = Stack()
    trained(model, lambda x: torch.stack([model(half) for half in x.split(1)]))
    assert set(heard.facts.workload.rows.values()) == {(1,)}
    assert set(heard.facts.workload.rows) == {each.name for each in heard.facts.linears()}


def test_an_autocast_of_transformer_engine_in_the_forward(
    observer: ScriptObserver, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    trained(nn.Sequential(Opening()), width=32)
    assert heard.facts.training.fp8_autocast is True


@pytest.mark.slow
def test_compiled_code_hides_its_calls(observer: ScriptObserver, heard: Heard) -> None:
    model = flagged(LikeTimm())
    model.compile(backend="eager")
    trained(model)
    facts = heard.facts
    assert [each.active for each in facts.training.checkpointing] == [None]
    assert not any(recorded(each, "checkpointed") for each in facts.linears())
    assert facts.gaps["network.linears.checkpointed"] == IN_COMPILED_CODE
    assert not recorded(facts, "workload.rows")


@pytest.mark.slow
def test_what_is_around_compiled_blocks_is_seen(observer: ScriptObserver, heard: Heard) -> None:
    torch._dynamo.reset()
    model: Any = flagged(LikeTimm())
    for layer in model.layers:
        layer.compile(backend="eager")
    trained(model)
    facts = heard.facts
    assert [each.active for each in facts.training.checkpointing] == [True]
    assert [each.checkpointed for each in facts.linears()] == [None, *["layers.0"] * 2, *["layers.1"] * 2]
