"""An autocast that the user's own code opens is seen in a forward; one of a library is not counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.facts import recorded
from tests.examine.models import called, llama
from tests.stand_ins import transformer_engine

BOUND = torch.autocast("cpu", dtype=torch.bfloat16)
FACT = "training.autocast_within"


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(x)


class ByName(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with BOUND:
            return super().forward(x)


class Unless(nn.Linear):
    """Names one for another batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 5:
            with torch.autocast("cpu"):
                return super().forward(x)
        return super().forward(x)


class Plain(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def step(model: Any, batch: Any) -> Any:
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


def plain(model: Any, batch: Any) -> Any:
    return model(batch)


def within(model: nn.Module, step: Callable[..., Any] | None = None) -> bool:
    return called(model, torch.ones(2, 4), training_step=step).training.autocast_within


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Named, True),
        (ByName, True),
        (Unless, False),
        (Plain, False),
        (nn.Linear, False),
    ],
)
def test_forwards(kind: type[nn.Module], found: bool) -> None:
    assert within(nn.Sequential(nn.ReLU(), kind(4, 4))) is found


@pytest.mark.parametrize(
    ("step", "found"),
    [(step, True), (plain, False), (None, False)],
)
def test_training_steps(step: Callable[..., Any] | None, found: bool) -> None:
    assert within(nn.Linear(4, 4), step) is found


@pytest.mark.parametrize(("step", "found"), [(in_fp8, False), (in_fp8_and_in_bf16, True)])
def test_transformer_engines_autocast_is_not_torchs(
    step: Callable[..., Any], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(step.__globals__, "te", transformer_engine.install(monkeypatch))
    assert within(nn.Linear(4, 4), step) is found


def test_what_libraries_do_inside_is_their_own() -> None:
    """transformers switches autocast off around the rotary embedding."""
    batch = {"input_ids": torch.arange(16).reshape(1, 16)}
    assert (
        called(llama(), batch, training_step=lambda model, batch: model(**batch)).training.autocast_within
        is False
    )


@pytest.mark.parametrize("batch", [None, torch.ones(2, 3)], ids=["no batch", "a batch that does not fit"])
def test_without_a_forward_it_is_unknown(batch: torch.Tensor | None) -> None:
    facts = called(Named(4, 4), batch)
    assert not recorded(facts, FACT)
    assert facts.gaps[FACT]
    assert called(Plain(4, 4), batch).training.autocast_within is False


class Held(nn.Sequential):
    """Its code does not name what it opens."""

    context = BOUND

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context:
            return super().forward(x)


class SwitchedOff(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class Half(nn.Sequential):
    """A GPU's autocast is to fp16 if nothing else is said."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "dtype", "found"),
    [
        (Held, "bfloat16", True),
        (Half, "float16", True),
        (SwitchedOff, None, False),
        (nn.Sequential, None, False),
    ],
)
def test_the_dtype_is_that_of_the_layers(kind: type[nn.Module], dtype: str | None, found: bool) -> None:
    training = called(kind(nn.Linear(4, 4)), torch.ones(2, 4)).training
    assert (training.autocast, training.autocast_within) == (dtype, found)
