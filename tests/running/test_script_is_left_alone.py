"""A script under the observer trains, compiles, profiles, fails and ends as without it."""

import copy
import gc
import pickle
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from fp8doctor.running.observer import ScriptObserver
from fp8doctor.running.script_messages import WatchOptions
from fp8doctor.running.step_profiler import GAVE_WAY
from fp8doctor.running.step_window import StepWindow
from fp8doctor.stacks.torch_private import COMPILED_CALL
from fp8doctor.trial.measure.evidence import ANOTHER_PROFILER
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, Slicing, train


@pytest.mark.parametrize("steps", [WARMUP + 1, WARMUP + STEPS], ids=["in the window", "after it"])
def test_the_model_is_not_kept_alive(steps: int, observer: ScriptObserver) -> None:
    model = Net()
    train(model, steps)
    assert (COMPILED_CALL in vars(type(model))) is (steps <= WARMUP + 1)
    ended = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ended() is None
    finally:
        gc.enable()


class Count(TorchDispatchMode):
    """Counts operations, as a user's own mode does."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_a_mode_of_the_script_sees_the_script_alone(observer: ScriptObserver) -> None:
    counts = []
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS + PROFILED + 1):
        with Count() as mode:
            train(model, 1, optimizer=optimizer)
        counts.append(mode.operations)
    assert observer.done
    assert len(set(counts[1:])) == 1


def test_the_captured_gradient_trains_the_same(observer: ScriptObserver) -> None:
    observer.settings = WatchOptions("train.py", STEPS, WARMUP, stop=False, budget_s=1.0, device=None)
    model, gradients = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(WARMUP + STEPS):
        batch = torch.randn(8, 16)
        nn.functional.cross_entropy(model(batch, scale=0.5), torch.arange(8)).backward()
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        batch.zero_()
    job = observer.job
    assert job is not None
    assert job.loss is not None
    assert set(job.batch) == {"x", "scale"}
    job.loss(model(**job.batch), job.batch).backward()
    for mine, theirs in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(mine.grad, theirs)


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def assigned(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def slicing(model: nn.Module) -> Any:
    model.__class__ = Slicing
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", [whole, blocks, assigned, slicing])
def test_nothing_is_compiled_again(
    form: Callable[[nn.Module], Any], observer: ScriptObserver, heard: Heard
) -> None:
    torch._dynamo.reset()
    model = Net()
    call = form(model)
    optimizer = train(model, 1, call=call)
    before = dict(counters["frames"]), sum(counters["recompiles"].values())
    train(model, WARMUP + STEPS + PROFILED + 1, call=call, optimizer=optimizer)
    assert (dict(counters["frames"]), sum(counters["recompiles"].values())) == before
    facts = heard.facts
    assert (facts.observed.calls, facts.observed.compiled) == (1, 0)
    assert facts.observed.graphs_run == (2 if form is blocks else 1)
    assert facts.workload.batch_size == 8
    assert facts.training.compile_marks


@pytest.mark.slow
def test_a_compiled_function_is_left_alone(observer: ScriptObserver, heard: Heard) -> None:
    torch._dynamo.reset()
    model = Net()
    call = torch.compile(lambda x: model(x) * 2, backend="eager")
    optimizer = train(model, 1, call=call)
    before = counters["frames"]["total"]
    train(model, WARMUP + STEPS, call=call, optimizer=optimizer)
    assert counters["frames"]["total"] == before
    facts = heard.facts
    assert facts.observed.calls is None
    assert facts.workload.note is not None
    assert "a function of the script is compiled" in facts.workload.note


@pytest.mark.slow
@pytest.mark.parametrize("holds_model", [True, False])
def test_layers_in_a_compiled_function_are_compiled(
    holds_model: bool, observer: ScriptObserver, heard: Heard
) -> None:
    """A compiled loss alone compiles none of them."""
    torch._dynamo.reset()
    model = Net()
    function = torch.compile(lambda x: (model(x) if holds_model else x) * 2, backend="aot_eager")
    train(model, 1 + WARMUP + STEPS, call=function if holds_model else lambda x: function(model(x)))
    facts = heard.facts
    assert {each.compiled for each in facts.linears()} == {"" if holds_model else None}
    assert [each.form for each in facts.training.compile_marks] == ["training_step"] * holds_model


def test_a_model_that_raises_in_the_window(observer: ScriptObserver) -> None:
    model = Net()
    optimizer = train(model, WARMUP + 1)
    assert COMPILED_CALL in vars(type(model))
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(8, 17))
    frames = [each.filename for each in traceback.extract_tb(raised.value.__traceback__)]
    assert not [each for each in frames if "fp8doctor/running" in each]
    train(model, STEPS, optimizer=optimizer)
    assert COMPILED_CALL not in vars(model)
    assert COMPILED_CALL not in vars(type(model))


def test_copies_and_pickles_of_a_model_in_the_window(observer: ScriptObserver) -> None:
    wrapped = nn.Sequential(Net())
    train(wrapped, WARMUP + 1)
    assert COMPILED_CALL in vars(type(wrapped))
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert vars(other).get(COMPILED_CALL) is None
        other(torch.randn(8, 16))


def test_a_failure_of_ours_is_told_and_reaches_nobody(
    observer: ScriptObserver, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepWindow, "observation", lambda *_: 1 / 0)
    model = Net()
    train(model, WARMUP + STEPS + 1)
    assert heard.notes == ["fp8doctor could not watch any further: ZeroDivisionError: division by zero"]
    assert COMPILED_CALL not in {*vars(model), *vars(type(model))}


def test_a_step_after_the_window_runs_two_calls_of_ours(observer: ScriptObserver) -> None:
    model, calls = Net(), Counter[str]()
    optimizer = train(model, WARMUP + STEPS + PROFILED)
    assert observer.done
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_filename] * (event == "call")))
    try:
        train(model, 1, optimizer=optimizer)
    finally:
        sys.setprofile(None)
    assert sum(count for name, count in calls.items() if "/fp8doctor/" in name) == 2


@pytest.mark.parametrize("before", [0, WARMUP + STEPS, WARMUP + STEPS + 1])
def test_a_script_with_a_profiler_of_its_own(before: int, observer: ScriptObserver, heard: Heard) -> None:
    """Before ours, while ours is prepared, and while it records."""
    model = Net()
    optimizer = train(model, before) if before else None
    steps = 3 if before else WARMUP + STEPS + 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, steps, optimizer=optimizer)
    assert len([each for each in profiler.events() if each.name == "Optimizer.step#SGD.step"]) == steps
    why = GAVE_WAY if before else ANOTHER_PROFILER
    assert heard.notes == [f"no step was profiled: {why}"]
    assert heard.facts.gaps["observed.breakdown"] == why
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert observer.done
