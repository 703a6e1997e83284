"""Jobs that are misconfigured the way people do it, diagnosed from their own steps, without a trial."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import recorded
from fp8doctor.running.examination import NO_CALL
from fp8doctor.running.observer import LONGEST_WARMUP, ScriptObserver
from tests.checks.engagement import accelerated
from tests.examine.models import llama, lora
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.stand_ins import transformer_engine as te

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.up(x)
        return output


class Fused(Block):
    """Reads the weight, as fused kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.up.weight)


@pytest.fixture
def found(observer: ScriptObserver, heard: Heard) -> Callable[..., dict[str, str]]:
    """Train a model, and tell code -> title of what is found.

    The window opens later if a step compiles, as what other tests left in the compiler can cause.
    """

    def of(model: nn.Module, step: Callable[..., Any] | None = None) -> dict[str, str]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(LONGEST_WARMUP * WARMUP + STEPS + PROFILED):
            if observer.done:
                break
            loss = step(model) if step else model(torch.ones(16, WIDTH, dtype=torch.bfloat16)).float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert observer.done
        findings = diagnose(heard.facts).findings
        return {key: each.title for each in findings for key in (each.code, each.name)}

    return of


def test_layers_whose_weights_are_read(found: Callable[..., dict[str, str]], heard: Heard) -> None:
    titles = found(convert_to_float8_training(nn.Sequential(Fused(), Fused())))
    assert titles["fp8-never-engaged"] == "No FP8 matmul ran in a training step with 2 FP8 layers"
    assert diagnose(heard.facts).verdict.status == "fp8_not_engaged"


@pytest.mark.slow
def test_layers_that_were_converted_inside_a_compiled_wrapper(found: Callable[..., dict[str, str]]) -> None:
    model = nn.Sequential(nn.Sequential(Block(), nn.ReLU(), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)))
    model[0][2] = torch.compile(model[0][2], backend="eager")
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "_orig_mod" in name)
    titles = found(model)
    assert titles["fp8-never-engaged"] == "No FP8 matmul ran in a training step with 1 FP8 layer"
    assert "hooks-or-subclass-lost" in titles


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_that_run(found: Callable[..., dict[str, str]], heard: Heard, compiled: bool) -> None:
    model = convert_to_float8_training(nn.Sequential(Block(), Block()))
    if compiled:
        for block in model:
            block.compile()
    assert "fp8-never-engaged" not in found(model)
    ran = 5 if compiled else 6  # the compiler leaves the gradient of the input out
    assert heard.facts.observed.fp8_gemms == ran
    assert diagnose(heard.facts).verdict.status != "fp8_not_engaged"


def test_emulated_layers_are_not_called_idle(found: Callable[..., dict[str, str]]) -> None:
    config = Float8LinearConfig(emulate=True)
    titles = found(convert_to_float8_training(nn.Sequential(Block()), config=config))
    assert "emulated-fp8" in titles
    assert "fp8-never-engaged" not in titles


@pytest.mark.slow
def test_a_head_that_was_tied(found: Callable[..., dict[str, str]]) -> None:
    model = llama(tie_word_embeddings=True).bfloat16()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)
    ids = torch.zeros(1, 16, dtype=torch.long)
    titles = found(model, lambda model: model(input_ids=ids, labels=ids).loss)
    assert titles["tied-weights-untied"] == "lm_head.weight is no longer tied to model.embed_tokens.weight"


def test_fp8_that_nobody_asked_for(
    found: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def job() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    accelerated.prepare(monkeypatch, *job())  # installs the stand-in
    monkeypatch.setattr(
        sys.modules["transformer_engine.pytorch"],
        "fp8_autocast",
        lambda enabled, fp8_recipe: te.autocast(enabled, fp8_recipe),
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    model, _ = Accelerator(mixed_precision="bf16", cpu=True).prepare(*job())
    titles = found(model, lambda model: model(torch.ones(16, WIDTH)).sum())
    assert titles["hidden-fp8"].endswith("the precision is bf16: 3 of 3 Linears in FP8")


@pytest.mark.slow
def test_a_recompute_outside_the_autocast(
    found: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([te.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    def step(model: nn.Module) -> torch.Tensor:
        with te.autocast(recipe=te.DelayedScaling()):
            output = model(torch.ones(16, WIDTH, requires_grad=True))
        loss: torch.Tensor = output.sum()
        return loss

    title = found(Net(), step)["CKP002"]
    assert title.startswith("2 Transformer Engine layers are not recomputed in FP8: layers.0 (32 x 32) and ")


@pytest.mark.slow
def test_an_autocast_around_calls_that_were_not_seen_is_not_said_to_be_missing(
    found: Callable[..., dict[str, str]], heard: Heard
) -> None:
    """As in tests/patients/gpu/unsloth_lora.py: Unsloth compiles functions, so that no call is watched."""
    model = lora(llama().bfloat16())
    tokens = torch.arange(16).reshape(1, 16)
    call = torch.compile(lambda: model(input_ids=tokens, labels=tokens).loss, backend="eager")

    def step(_: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = call()
        return loss

    assert "LORA002" not in found(model, step)
    facts = heard.facts
    assert not recorded(facts, "training.autocast")
    assert facts.gaps["training.autocast"] == NO_CALL
    assert (recorded(facts, "workload.loss_source"), recorded(facts, "workload.autocast_source")) == (
        False,
        False,
    )
    (outcome,) = (each for each in diagnose(facts).outcomes if each.code == "LORA002")
    assert (outcome.outcome, outcome.reason) == ("unknown", f"training.autocast: {NO_CALL}")


@pytest.mark.slow
def test_without_an_autocast_around_calls_that_were_seen_it_is_said_to_be_missing(
    found: Callable[..., dict[str, str]],
) -> None:
    tokens = torch.arange(16).reshape(1, 16)
    assert "LORA002" in found(
        lora(llama().bfloat16()), lambda model: model(input_ids=tokens, labels=tokens).loss
    )


@pytest.mark.slow
@pytest.mark.parametrize("around", [torch.bfloat16, None])
def test_an_autocast_within_a_closure_is_seen(
    around: torch.dtype | None, observer: ScriptObserver, heard: Heard
) -> None:
    """Its calls are watched, though no batch is taken of them."""
    model, tokens = lora(llama().bfloat16()), torch.arange(16).reshape(1, 16)
    optimizer = torch.optim.SGD(each for each in model.parameters() if each.requires_grad)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around is not None):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    for _ in range(WARMUP + STEPS + PROFILED):
        optimizer.step(closure)
    assert heard.facts.training.autocast == (None if around is None else "bfloat16")
    (found,) = (each for each in diagnose(heard.facts).findings if each.code == "LORA002")
    assert found.severity == ("warning" if around is None else "info")


@pytest.mark.slow
def test_the_autocast_is_that_of_the_first_call_of_a_step(
    found: Callable[..., dict[str, str]], heard: Heard
) -> None:
    """As the batch is: a second call may be of a penalty that stands outside of it."""
    tokens = torch.arange(16).reshape(1, 16)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss + model(input_ids=tokens, labels=tokens).loss

    found(lora(llama().bfloat16()), step)
    assert heard.facts.training.autocast == "bfloat16"
