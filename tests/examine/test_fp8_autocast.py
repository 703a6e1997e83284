"""Whether a step opens Transformer Engine's autocast is seen in a forward, or is unknown."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8doctor.examine.autocasts import no_code_names_fp8_autocast
from fp8doctor.facts import recorded
from fp8doctor.report import Report
from fp8doctor.trial.layers import seen_calls
from tests.looked import looked
from tests.stand_ins import transformer_engine as te

TEACHER = nn.Linear(32, 32)
CONTEXT = contextlib.nullcontext()


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


def plain(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        wanted = TEACHER(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.mse_loss(model(batch), wanted)


def opens(model: Any, batch: Any) -> Any:
    with te.autocast(recipe=te.Float8CurrentScaling()):
        return model(batch).sum()


def calls_one_that_opens(model: Any, batch: Any) -> Any:
    return opens(model, batch)


def runs_no_layer(model: Any, batch: Any) -> Any:
    return batch.sum()


def closes(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=False):
        return model(batch).sum()


def in_some_context(model: Any, batch: Any) -> Any:
    with CONTEXT:
        return model(batch).sum()


def enters(model: Any, batch: Any) -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(CONTEXT)
    return model(batch).sum()


def imports_another(model: Any, batch: Any) -> Any:
    import no_such_module

    return no_such_module.step(model, batch)


def of(model: nn.Module, step: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch) -> Report:
    te.install(monkeypatch)
    return looked(model, torch.ones(16, 32), training_step=step)


def outcome(report: Report) -> str:
    return next(each.outcome for each in report.outcomes if each.code == "MOD002")


@pytest.mark.slow
def test_a_step_that_opens_no_autocast_runs_its_layers_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)), plain, monkeypatch)
    finding = next(each for each in report.findings if each.code == "MOD002")
    assert finding.title == "The training step opens no FP8 autocast around 2 Transformer Engine layers"
    assert report.verdict.status == "fp8_not_engaged"


@pytest.mark.slow
@pytest.mark.parametrize("step", [opens, calls_one_that_opens])
def test_a_step_that_opens_one_is_left_to_the_trial(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]
) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.slow
def test_so_is_a_forward_that_opens_one(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(nn.Sequential(Opening()), plain, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.slow
@pytest.mark.parametrize("step", [in_some_context, enters, closes])
def test_another_context_is_none(monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert report.facts.training.fp8_autocast is False


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, runs_no_layer, imports_another])
def test_without_a_forward_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any] | None
) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert not recorded(report.facts, "training.fp8_autocast")
    assert outcome(report) == "unknown"


@pytest.mark.slow
def test_so_is_a_step_around_which_one_is_open_now(monkeypatch: pytest.MonkeyPatch) -> None:
    library = te.install(monkeypatch)
    with library.autocast(recipe=te.Float8CurrentScaling()):
        report = of(nn.Sequential(te.Linear(32, 32)), plain, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.slow
def test_a_model_without_such_layers_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of(nn.Linear(32, 32), plain, monkeypatch).facts.training.fp8_autocast is None


class Runner:
    """An object of the user's, whose methods open the autocast."""

    def __call__(self, model: Any, batch: Any) -> Any:
        return opens(model, batch)


class Layered(nn.Module):
    """A forward that opens nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.Linear(32, 32)
        self.runner: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Derived(Opening):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class WithLoss(Layered):
    def loss(self, batch: Any) -> Any:
        return opens(self.layer, batch)


class Called(Layered):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast():
            return super().__call__(x)


class Static(Layered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layer, x)

    run = staticmethod(opens)


class Holding(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.runner = Runner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.runner(self.layer, x)


def hooked() -> nn.Module:
    made = Layered()
    made.register_forward_pre_hook(lambda module, given: te.autocast().__enter__())
    return made


def patched() -> nn.Module:
    made = nn.Sequential(nn.Sequential(te.Linear(32, 32)), nn.Sequential(nn.ReLU()))
    made[0].forward = lambda x: opens(made[0][0], x)  # type: ignore[method-assign]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("make", [Derived, Called, Static, Holding, patched])
def test_so_is_a_model_that_opens_one_in_another_way(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    report = of(make(), plain, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.slow
def test_a_hook_that_opens_one_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(hooked(), plain, monkeypatch)
    assert not recorded(report.facts, "training.fp8_autocast")
    assert outcome(report) == "unknown"


def of_the_model(model: Any, batch: Any) -> Any:
    return model.loss(batch)


def of_a_cache(model: Any, batch: Any) -> Any:
    return functools.cache(opens)(model, batch)


def of_a_text(model: Any, batch: Any) -> Any:
    return getattr(model, "loss")(batch)  # noqa: B009


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        of_the_model,
        of_a_cache,
        of_a_text,
    ],
)
def test_so_is_a_step_that_opens_one_in_another_way(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]
) -> None:
    report = of(WithLoss(), step, monkeypatch)
    assert outcome(report) == "not_applicable"


class PlainRunner:
    """Of the user's, and opens nothing."""

    def step(self, model: Any, batch: Any) -> Any:
        return plain(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("step", [PlainRunner().step, functools.partial(plain), torch.compile(plain)])
def test_one_that_opens_none(monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]) -> None:
    assert of(Layered(), step, monkeypatch).facts.training.fp8_autocast is False


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("import torch\nwith torch.autocast('cpu'):\n    pass", True),
        ("with torch.amp.autocast('cuda'):\n    pass", True),
        ("with te.autocast():\n    pass", False),
        ("from transformer_engine.pytorch import fp8_autocast", False),
        ("def step(model, batch):\n    import not_loaded_yet", False),
        ("def step(:", False),
    ],
)
def test_what_the_text_of_the_users_modules_says(tmp_path: Path, text: str, silent: bool) -> None:
    module = types.ModuleType("mine")
    module.__file__ = str(tmp_path / "mine.py")
    Path(module.__file__).write_text(text)
    assert no_code_names_fp8_autocast({"mine": module, "torch": torch}) is silent


def test_a_notebook_cannot_be_read() -> None:
    main = types.ModuleType("__main__")
    assert no_code_names_fp8_autocast({"__main__": main})
    vars(main)["step"] = types.FunctionType(plain.__code__, {"__name__": "__main__"})
    assert not no_code_names_fp8_autocast({"__main__": main})


class NeedsGpu(nn.Module):
    """As ``te.TransformerLayer``, it runs on no fake tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs a GPU")


@pytest.mark.slow
@pytest.mark.parametrize(("silent", "expected"), [(True, "sick"), (False, "unknown")])
def test_a_layer_that_no_fake_tensor_runs_through(
    monkeypatch: pytest.MonkeyPatch, silent: bool, expected: str
) -> None:
    """MOD002 needs no forward if no code of the process names the autocast; that of this file does."""
    assert not no_code_names_fp8_autocast(sys.modules)
    if silent:
        monkeypatch.setattr(seen_calls, "no_code_names_fp8_autocast", lambda loaded: True)
    report = of(nn.Sequential(te.Linear(32, 32), NeedsGpu()), plain, monkeypatch)
    assert outcome(report) == expected
