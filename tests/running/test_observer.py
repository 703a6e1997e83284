"""The observer on real training loops in this process: the model found among several, its optimizer, its
window, and the stop."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.running.observer import ScriptObserver
from fp8doctor.running.script_messages import WatchOptions
from fp8doctor.stacks.torch_private import COMPILED_CALL
from fp8doctor.trial import Budget
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import TrialRun
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, train
from tests.stand_ins import transformer_engine as te
from tests.stand_ins.deepspeed_optimizer import ZeroOptimizer


def test_a_plain_loop(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    optimizer = train(model, WARMUP + STEPS + PROFILED)
    facts = heard.facts
    assert (facts.target.kind, facts.target.name) == ("script", "train.py")
    assert len(facts.network.linears) == 4
    assert (facts.workload.batch_source, facts.workload.batch_size) == ("given", 8)
    assert facts.training.optimizer == "torch.optim.sgd.SGD"
    assert facts.training.gradients_seen
    seen = facts.observed
    assert len(seen.steps_ms) == STEPS
    assert (seen.calls, seen.clock) == (1, "host")
    assert seen.data_ms is None
    assert heard.notes == []
    assert all(COMPILED_CALL not in vars(module) for module in model.modules())
    before = len(heard.messages)
    train(model, 2, optimizer=optimizer)
    assert len(heard.messages) == before


def test_the_optimizer_that_holds_most_counts(observer: ScriptObserver, heard: Heard) -> None:
    large, small = Net(3), Net(1)
    both = [torch.optim.SGD(small.parameters(), lr=0.01), torch.optim.AdamW(large.parameters(), lr=0.01)]
    for _ in range(WARMUP + STEPS):
        for model, optimizer in zip((small, large), both, strict=True):
            train(model, 1, optimizer=optimizer)
    facts = heard.facts
    assert len(facts.network.linears) == 6
    assert len(facts.observed.steps_ms) == STEPS


@pytest.mark.parametrize("apart", [True, False])
def test_a_second_model_that_trains_is_named(observer: ScriptObserver, heard: Heard, apart: bool) -> None:
    generator, critic = Net(3), nn.Sequential(nn.Linear(16, 1))
    if not apart:
        generator.critic = critic
    optimizers = [torch.optim.SGD(each.parameters()) for each in (generator, critic)]
    for _ in range(WARMUP + STEPS):
        critic(generator(torch.randn(8, 16))).mean().backward()
        for each in optimizers:
            each.step()
    assert [("Net" in note and "Sequential" in note) for note in heard.notes] == [True] * apart


def test_a_model_whose_trained_weights_were_all_replaced(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(each.detach().clone()))
    train(model, WARMUP + STEPS, optimizer=optimizer)
    assert heard.facts.training.parameters_outside_optimizer == 8


def test_an_optimizer_that_is_done_with_makes_room(observer: ScriptObserver, heard: Heard) -> None:
    kept = train(Net(), WARMUP + 1)
    assert observer.window is not None
    train(Net(3), WARMUP + STEPS)  # larger
    assert kept.param_groups
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert len(heard.facts.network.linears) == 6


def test_steps_without_a_model(observer: ScriptObserver, heard: Heard) -> None:
    weight = nn.Parameter(torch.zeros(3))
    train(None, WARMUP + STEPS, call=lambda x: weight, optimizer=torch.optim.SGD([weight], lr=0.1))
    facts = heard.facts
    assert "no module" in facts.gaps["network"]
    assert len(facts.observed.steps_ms) == STEPS


@pytest.mark.slow
def test_a_model_that_is_frozen(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    gc.freeze()
    try:
        train(model, WARMUP + STEPS)
    finally:
        gc.unfreeze()
    assert len(heard.facts.network.linears) == 4
    assert heard.facts.workload.batch_size == 8


def test_steps_of_a_forked_process(observer: ScriptObserver, heard: Heard) -> None:
    observer.process = 0
    train(Net(), WARMUP + STEPS)
    assert heard.messages == []


@pytest.mark.slow
def test_a_trial_before_the_stop(observer: ScriptObserver, heard: Heard) -> None:
    settings = WatchOptions("train.py", STEPS, WARMUP, stop=True, budget_s=0.1, device="cpu")
    observer.settings = settings
    with pytest.raises(SystemExit) as raised:
        train(Net(), 100)
    assert raised.value.code == 0
    assert heard.facts.trial.device == "cpu"
    assert heard.notes == [f"the script was stopped after {WARMUP + STEPS + PROFILED} steps, as --stop asks"]


def test_an_optimizer_of_deepspeed_that_steps_copies(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    optimizer = ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.observed.calls == 1
    assert facts.workload.batch_source == "given"
    assert facts.training.optimizer == f"{ZeroOptimizer.__module__}.ZeroOptimizer"
    assert facts.training.optimizer_stepped
    assert facts.training.parameters_outside_optimizer == 0


@pytest.mark.usefixtures("heard")
def test_the_copies_run_under_the_scripts_own_fp8_autocast(
    observer: ScriptObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module keeps it."""
    te.install(monkeypatch)
    recipe, jobs = te.Float8CurrentScaling(), list[Any]()
    observer.settings = WatchOptions("train.py", STEPS, WARMUP, stop=True, budget_s=1.0, device=None)
    monkeypatch.setattr(observer, "stop", lambda: jobs.append(observer.job))
    model = nn.Sequential(te.Linear(16, 16), te.Linear(16, 16))

    def call(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return model(x)

    with pytest.raises(SystemExit):
        train(model, 100, call=call)
    observer.handle.remove()
    [job] = jobs
    assert not te.FP8GlobalStateManager.enabled
    with Bench(job, [], TrialRun(torch.device("cpu"), Budget(600))).variant(job.model).around():
        assert te.FP8GlobalStateManager.enabled
        assert te.FP8GlobalStateManager.recipe is recipe
