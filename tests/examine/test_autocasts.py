"""Autocasts that the user's code opens, torch's and Transformer Engine's: seen in a forward, or unknown."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.facts import Training
from tests.checks.rules import outcome_of
from tests.examine.models import called, llama
from tests.looked import looked
from tests.stand_ins import transformer_engine as te

BOUND = torch.autocast("cpu", dtype=torch.bfloat16)


class Named(nn.Sequential):
    """A GPU's autocast is to fp16 if nothing else is said."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            return super().forward(x)


class Held(nn.Sequential):
    """Its code does not name what it opens."""

    context = BOUND

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context:
            return super().forward(x)


class Unless(nn.Sequential):
    """Names one for another batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 5:
            with torch.autocast("cpu"):
                return super().forward(x)
        return super().forward(x)


class SwitchedOff(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def within(model: nn.Module, step: Callable[..., Any] | None = None) -> Training:
    return called(model, torch.ones(2, 4), training_step=step).training


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Named, "float16"), (Held, "bfloat16"), (Unless, None), (SwitchedOff, None), (nn.Sequential, None)],
)
def test_forwards(kind: type[nn.Module], dtype: str | None) -> None:
    """The dtype is that of the layers."""
    found = within(kind(nn.Linear(4, 4)))
    assert (found.autocast, found.autocast_within) == (dtype, dtype is not None)


def in_bf16(model: Any, batch: Any) -> Any:
    def inner() -> Any:
        with torch.autocast("cpu"):
            return model(batch)

    return inner()


def in_fp8(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=True):
        return model(batch)


def in_both(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=True), torch.autocast("cpu"):
        return model(batch)


@pytest.mark.parametrize(
    ("step", "found"),
    [(in_bf16, True), (lambda model, batch: model(batch), False), (in_fp8, False), (in_both, True)],
)
def test_training_steps(step: Any, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's autocast is not torch's."""
    te.install(monkeypatch)
    assert within(nn.Linear(4, 4), step).autocast_within is found


def test_what_libraries_do_inside_is_their_own() -> None:
    """transformers switches autocast off around the rotary embedding."""
    batch = {"input_ids": torch.arange(16).reshape(1, 16)}
    facts = called(llama(), batch, training_step=lambda model, batch: model(**batch))
    assert facts.training.autocast_within is False


# Transformer Engine's


class Opening(nn.Module):
    """A forward of the user's own that opens the autocast in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=te.Float8CurrentScaling()):
            return self.layer(x)


class NeedsGpu(nn.Module):
    """As ``te.TransformerLayer``, it runs on no fake tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs a GPU")


def layer() -> nn.Module:
    return nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))


def hooked() -> nn.Module:
    made = layer()
    made.register_forward_pre_hook(lambda module, given: te.autocast().__enter__())
    return made


def plain(model: Any, batch: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch).sum()


def opens(model: Any, batch: Any) -> Any:
    with te.autocast(recipe=te.Float8CurrentScaling()):
        return model(batch).sum()


def closes(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=False), contextlib.nullcontext():
        return model(batch).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "step", "around", "found"),
    [
        (layer, opens, False, True),
        (layer, plain, False, False),
        (layer, closes, False, False),
        (layer, plain, True, True),
        (layer, None, False, None),
        (layer, lambda model, batch: batch.sum(), False, None),
        (lambda: nn.Sequential(Opening()), plain, False, True),
        (hooked, plain, False, None),
        (lambda: nn.Sequential(te.Linear(32, 32), NeedsGpu()), plain, False, None),
    ],
)
def test_an_fp8_autocast(
    build: Callable[[], nn.Module],
    step: Any,
    around: bool,
    found: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = te.install(monkeypatch)
    recipe = library.autocast(recipe=te.Float8CurrentScaling()) if around else contextlib.nullcontext()
    with recipe:
        report = looked(build(), torch.ones(16, 32), training_step=step)
    assert report.facts.get("training.fp8_autocast") is found
    outcome = {True: "not_applicable", False: "fires", None: "unknown"}[found]
    assert outcome_of("fp8-never-engaged", report.facts) == outcome
    assert (report.verdict.status == "fp8_not_engaged") is (found is False)
