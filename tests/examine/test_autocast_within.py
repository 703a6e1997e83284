"""An autocast in the user's own code is noticed, one of a library or none is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.examine.autocast_within import opens_autocast
from fp8doctor.examine.walk import walk
from tests.examine.models import llama
from tests.stand_ins import transformer_engine

BOUND = torch.autocast("cpu", dtype=torch.bfloat16)


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class ByName(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with BOUND:
            return super().forward(x)


class Plain(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def named(model: Any, batch: Any) -> Any:
    def inner() -> Any:
        with torch.autocast("cpu"):
            return model(batch)

    return inner()


te: Any = None
"""Transformer Engine, as a script imports it."""


def in_fp8(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=True):
        return model(batch)


def in_fp8_and_in_bf16(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=True), torch.autocast("cpu"):
        return model(batch)


@pytest.mark.parametrize(("step", "found"), [(in_fp8, False), (in_fp8_and_in_bf16, True)])
def test_transformer_engines_autocast_is_not_torchs(
    step: Callable[..., Any], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(step.__globals__, "te", transformer_engine.install(monkeypatch))
    assert opens_autocast(walk(nn.Linear(4, 4)), step) is found


def in_a_closure() -> Callable[..., Any]:
    context = torch.autocast("cpu", dtype=torch.bfloat16)

    def step(model: Any, batch: Any) -> Any:
        with context:
            return model(batch)

    return step


def plain(model: Any, batch: Any) -> Any:
    return model(batch)


@pytest.mark.parametrize(
    ("kind", "found"), [(Named, True), (ByName, True), (Plain, False), (nn.Linear, False)]
)
def test_forwards(kind: type[nn.Module], found: bool) -> None:
    assert opens_autocast(walk(nn.Sequential(nn.ReLU(), kind(4, 4))), None) is found


def test_a_compiled_forward_is_looked_into() -> None:
    model = Named(4, 4)
    model.forward = torch.compile(model.forward)
    assert opens_autocast(walk(model), None)


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (named, True),
        (in_a_closure(), True),
        (torch.compile(named), True),
        (plain, False),
        (print, False),
        (None, False),
    ],
)
def test_training_steps(step: Callable[..., Any] | None, found: bool) -> None:
    assert opens_autocast(walk(nn.Linear(4, 4)), step) is found


def test_what_libraries_do_inside_is_their_own() -> None:
    """transformers switches autocast off around the rotary embedding."""
    assert opens_autocast(walk(llama()), None) is False


def test_an_empty_closure_cell_is_no_error() -> None:
    def build() -> Callable[..., Any]:
        def step(model: Any, batch: Any) -> Any:
            return later

        if False:
            later = None
        return step

    assert opens_autocast(walk(nn.Linear(4, 4)), build()) is False
