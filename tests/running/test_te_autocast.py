"""The FP8 autocast of Transformer Engine that a script calls its model under, which no module keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.running.observer import ScriptObserver
from fp8doctor.running.script_messages import WatchOptions
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from tests.stand_ins import transformer_engine as te


class Heard(list[Any]):
    """A channel that keeps what it is sent."""

    forked = False
    send = list.append


def train(recipe: te.Recipe) -> None:
    model = nn.Sequential(te.Linear(16, 16), te.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        with te.autocast(recipe=recipe):
            output = model(torch.ones(4, 16))
        output.sum().backward()
        optimizer.step()


def test_the_copies_run_under_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    recipe = te.Float8CurrentScaling()
    settings = WatchOptions("train.py", 3, 1, stop=True, budget_s=1.0, device=None)
    observer = ScriptObserver(Heard(), settings)  # type: ignore[arg-type]
    jobs: list[Any] = []
    monkeypatch.setattr(observer, "stop", lambda: jobs.append(observer.job))
    observer.install()
    try:
        with pytest.raises(SystemExit):
            train(recipe)
    finally:
        observer.handle.remove()
        observer.watch.__exit__(None, None, None)
    [job] = jobs
    assert not te.FP8GlobalStateManager.enabled
    with Bench(job, [], TrialRun(torch.device("cpu"), Budget(600))).variant(job.model).around():
        assert te.FP8GlobalStateManager.enabled
        assert te.FP8GlobalStateManager.recipe is recipe
