"""The observer on real training loops in this process: the model found among several, its optimizer, its
window, and the stop."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from fp8doctor.facts import recorded
from fp8doctor.running.observer import IDLE_STEPS, ScriptObserver
from fp8doctor.running.script_messages import Stepped, WatchOptions
from fp8doctor.running.stepped_model import LiveObjects, owner
from fp8doctor.stacks.torch_private import COMPILED_CALL
from tests.checks.environment.live import finding_of
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, train


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
    assert (seen.warmup, seen.calls, seen.clock, seen.share_pct) == (WARMUP, 1, "host", 100)
    assert seen.data_ms is None
    assert heard.notes == []
    assert all(COMPILED_CALL not in vars(module) for module in model.modules())
    before = len(heard.messages)
    train(model, 2, optimizer=optimizer)
    assert len(heard.messages) == before


def test_facts_are_there_after_the_first_step(observer: ScriptObserver, heard: Heard) -> None:
    train(Net(), 1)
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.training.gradients_seen
    assert not recorded(facts, "observed")
    assert observer.closed() == 1
    assert not recorded(heard.facts, "observed")


def test_a_window_that_is_cut_short(heard: Heard, observer: ScriptObserver) -> None:
    observer.settings = WatchOptions("train.py", 10, WARMUP, stop=False, budget_s=None, device=None)
    model = Net()
    train(model, WARMUP + STEPS)
    assert observer.closed() == WARMUP + STEPS
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert COMPILED_CALL not in {*vars(model), *vars(type(model))}


def test_the_weights_of_a_moving_average_are_not_the_model(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    average = copy.deepcopy(model)
    train(model, WARMUP + STEPS, call=lambda x: (model(x), average(x))[0])
    assert heard.facts.observed.calls == 1


def test_the_optimizer_that_holds_most_counts(observer: ScriptObserver, heard: Heard) -> None:
    large, small = Net(3), Net(1)
    both = [torch.optim.SGD(small.parameters(), lr=0.01), torch.optim.AdamW(large.parameters(), lr=0.01)]
    for _ in range(WARMUP + STEPS):
        for model, optimizer in zip((small, large), both, strict=True):
            train(model, 1, optimizer=optimizer)
    facts = heard.facts
    assert len(facts.network.linears) == 6
    assert facts.observed.optimizers == ("torch.optim.adamw.AdamW", "torch.optim.sgd.SGD")
    assert len(facts.observed.steps_ms) == STEPS


def test_an_optimizer_that_is_done_with_makes_room(observer: ScriptObserver, heard: Heard) -> None:
    kept = train(Net(), WARMUP + 1)
    assert observer.window is not None
    train(Net(3), WARMUP + STEPS)  # larger
    assert kept.param_groups
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert len(heard.facts.network.linears) == 6


def test_a_trial_run_with_an_optimizer_of_its_own(observer: ScriptObserver, heard: Heard) -> None:
    first = Net()
    kept = train(first, WARMUP + 1)
    second = Net()
    train(second, IDLE_STEPS + STEPS + PROFILED)
    assert kept.param_groups
    assert all(COMPILED_CALL not in vars(module) for module in first.modules())
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert observer.done


def test_a_trial_run_that_is_forgotten(observer: ScriptObserver, heard: Heard) -> None:
    train(Net(), WARMUP + 1)
    assert observer.window is not None
    train(Net(1), WARMUP + STEPS)
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert len(heard.facts.network.linears) == 2


def test_a_window_of_another_model_than_the_first_that_stepped(
    observer: ScriptObserver, heard: Heard
) -> None:
    small, large = Net(1), Net(2)
    first = train(small, 1)
    train(large, WARMUP + 3)
    assert first.param_groups
    observer.closed()
    assert len(heard.facts.network.linears) == 4


def test_an_optimizer_that_is_built_anew_for_every_step(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    for _ in range(WARMUP + STEPS):
        train(model, 1)
    assert len(heard.facts.observed.steps_ms) == STEPS


def test_a_model_inside_another_that_is_never_called(observer: ScriptObserver, heard: Heard) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

    outer = Outer()
    train(outer, WARMUP + STEPS, call=outer.model)
    assert heard.facts.network.kind.endswith(".Net")
    assert heard.facts.observed.calls == 1


def test_steps_without_a_model(observer: ScriptObserver, heard: Heard) -> None:
    weight = nn.Parameter(torch.zeros(3))
    train(None, WARMUP + STEPS, call=lambda x: weight, optimizer=torch.optim.SGD([weight], lr=0.1))
    facts = heard.facts
    assert "no module" in facts.gaps["network"]
    assert len(facts.observed.steps_ms) == STEPS


def test_stopping(observer: ScriptObserver) -> None:
    observer.settings = WatchOptions("train.py", STEPS, WARMUP, stop=True, budget_s=None, device=None)
    with pytest.raises(SystemExit) as raised:
        train(Net(), 100)
    assert raised.value.code == 0


def test_nobody_owns_nothing() -> None:
    assert owner([], LiveObjects()) is None


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, WARMUP])
def test_a_model_that_is_frozen(observer: ScriptObserver, heard: Heard, steps: int) -> None:
    model = Net()
    optimizer = train(model, steps) if steps else None
    gc.freeze()
    try:
        train(model, WARMUP + STEPS, optimizer=optimizer)
    finally:
        gc.unfreeze()
    assert len(heard.facts.network.linears) == 4
    assert heard.facts.workload.batch_size == 8


@pytest.mark.slow
def test_an_optimizer_that_was_built_too_early(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.blocks[1].up = nn.Linear(16, 64)
    train(model, WARMUP + STEPS, optimizer=optimizer)
    assert heard.facts.training.parameters_outside_optimizer == 2
    assert heard.facts.training.first_outside_optimizer == ("blocks.1.up.weight", "blocks.1.up.bias")


def test_an_optimizer_whose_parameters_the_model_no_longer_has(
    observer: ScriptObserver, heard: Heard
) -> None:
    """As after Accelerate's `prepare` with torchao: the norm is all that the optimizer still trains."""
    model = nn.Sequential(Net(), nn.LayerNorm(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        layer.weight, layer.bias = (nn.Parameter(each.detach()) for each in (layer.weight, layer.bias))
    train(model, WARMUP + STEPS, optimizer=optimizer)
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.observed.share_pct < 1
    assert finding_of("MOD007", facts) is not None


def test_three_models_that_one_optimizer_trains_are_no_model(observer: ScriptObserver, heard: Heard) -> None:
    """None owns half, and all get gradients."""
    models = nn.ModuleList(Net() for _ in range(3))
    parts = [*models]
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.01)
    del models
    train(parts, WARMUP + STEPS, call=lambda x: sum(part(x) for part in parts), optimizer=optimizer)
    assert not recorded(heard.facts, "network")


def test_steps_of_a_forked_process(observer: ScriptObserver, heard: Heard) -> None:
    heard.forked = True
    train(Net(), WARMUP + STEPS)
    assert heard.messages == [Stepped(forked=True)]


def test_two_optimizers_share_a_model(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    both = [torch.optim.SGD(model.blocks[at].parameters(), lr=0.01) for at in (0, 1)]
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        for each in both:
            each.step()
            each.zero_grad()
    assert heard.facts.training.parameters_outside_optimizer == 0


def test_a_script_that_never_steps(observer: ScriptObserver, heard: Heard) -> None:
    Net()(torch.randn(8, 16)).sum().backward()
    assert observer.closed() == 0
    assert heard.messages == []


@pytest.mark.slow
def test_a_trial_before_the_stop(observer: ScriptObserver, heard: Heard) -> None:
    settings = WatchOptions("train.py", STEPS, WARMUP, stop=True, budget_s=0.1, device="cpu")
    observer.settings = observer.examination.settings = settings
    with pytest.raises(SystemExit):
        train(Net(), 100)
    assert heard.facts.trial.device == "cpu"
    assert heard.notes == [f"the script was stopped after {WARMUP + STEPS + PROFILED} steps, as --stop asks"]


@pytest.mark.slow
def test_a_trial_of_a_model_whose_calls_and_autocast_were_not_seen(
    observer: ScriptObserver, heard: Heard
) -> None:
    torch._dynamo.reset()
    settings = WatchOptions("train.py", STEPS, WARMUP, stop=True, budget_s=0.1, device="cpu")
    observer.settings = observer.examination.settings = settings
    model = Net()
    with pytest.raises(SystemExit):
        train(model, 100, call=torch.compile(lambda x: model(x) * 2, backend="eager"))
    assert not recorded(heard.facts, "training.autocast")
    assert heard.facts.trial.reason.startswith("there is no batch to run it on")
    assert heard.notes == [f"the script was stopped after {WARMUP + STEPS + PROFILED} steps, as --stop asks"]
