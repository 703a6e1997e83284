"""Does the host set the pace, and which variants are added if it does?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.copies.compiling import before_compiled
from fp8doctor.trial.measure import host_bound_probe
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.host_bound_probe import (
    STAYS_IN_THIS_PROCESS,
    add_if_host_bound,
    saves,
    waits_for_host,
)
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import VariantPlan, as_it_is
from tests.trial.decoder import AS_IS, BF16, CPU, job


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def in_place(model: nn.Module) -> nn.Module:
    for block in model.children():
        block.compile(backend="eager")
    return model


def wrapped(model: nn.Sequential) -> nn.Module:
    for number, block in enumerate(model):
        model[number] = torch.compile(block, backend="eager")
    return model


def by_method(model: nn.Module) -> nn.Module:
    for block in model.children():
        block.forward = torch.compile(block.forward, backend="eager")
    return model


def whole(model: nn.Module) -> nn.Module:
    in_place(model)
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("compiled", "calls"), [(in_place, 3), (wrapped, 3), (by_method, 3), (whole, 1), (nn.Sequential, 0)]
)
def test_what_is_compiled_is_preceded_and_not_compiled_anew(
    compiled: Callable[[nn.Module], nn.Module], calls: int
) -> None:
    torch._dynamo.reset()
    model, called, x = compiled(blocks()), [], torch.randn(2, 4)
    expected = model(x)
    marks = [dict(module.__dict__) for module in model.modules()]
    frames = counters["stats"]["unique_graphs"]
    with before_compiled(model, lambda: called.append(torch.compiler.is_compiling())):
        assert torch.equal(model(x), expected)
    assert called == [False] * calls
    assert torch.equal(model(x), expected)
    assert counters["stats"]["unique_graphs"] == frames
    assert [dict(module.__dict__) for module in model.modules()] == marks


def test_a_cpu_is_its_own_host() -> None:
    assert not waits_for_host(Ready(*[None] * 9), torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("usual_ms", "ahead_ms", "saved"), [(62.0, 61.0, False), (62.0, 45.0, True), (62.0, 64.0, False)]
)
def test_a_head_start_tells_who_sets_the_pace(usual_ms: float, ahead_ms: float, saved: bool) -> None:
    assert saves(usual_ms, ahead_ms) is saved


@pytest.mark.parametrize(
    ("waits", "own_process", "why"),
    [(True, True, None), (True, False, STAYS_IN_THIS_PROCESS), (False, True, None)],
)
def test_cuda_graphs_are_tried_before_the_explorations(
    waits: bool, own_process: bool, why: NoNumber | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_bound_probe, "waits_for_host", lambda ready, device: waits)
    ready = Ready(*[None] * 9)  # type: ignore[arg-type]
    plan = replace(AS_IS, if_host_bound=(VariantPlan("cuda-graphs", as_it_is),))
    of, bf16 = Attempt(plan, [ready]), Attempt(BF16)
    unasked = Attempt(VariantPlan("unasked", as_it_is, explored=True))
    attempts, bench = [of, bf16, unasked], SimpleNamespace(device=CPU)
    add_if_host_bound(of, bench, attempts, TrialRun(CPU, Budget(600), own_process=own_process))  # type: ignore[arg-type]
    names = [each.plan.name for each in attempts]
    assert names == ["as_is", "bf16", *(["cuda-graphs"] if waits else []), "unasked"]
    assert attempts[2].no_number == why


def test_a_probe_that_raises_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(ready: Ready, device: torch.device) -> bool:
        assert ready.model is not None
        ready.step()
        for parameter in ready.model.parameters():  # as if it ended in its backward
            parameter.grad = torch.ones_like(parameter)
        left.extend(ready.model.parameters())
        raise torch.OutOfMemoryError("the launches of two steps at once")

    left: list[nn.Parameter] = []
    monkeypatch.setattr(host_bound_probe, "waits_for_host", raises)
    bench = Bench(job(blocks=3), ["blocks"], CPU)
    attempt = Attempt(replace(AS_IS, if_host_bound=(BF16,)))
    bench.build(attempt)
    attempts = [attempt]
    add_if_host_bound(attempt, bench, attempts, TrialRun(CPU, Budget(600), own_process=True))
    assert left
    assert all(each.grad is None for each in left)
    assert attempts == [attempt]
    assert attempt.no_number is None
    bench.close()
