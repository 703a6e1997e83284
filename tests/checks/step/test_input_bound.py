"""STP008: real steps with a real DataLoader, on a clock that only their own work moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fp8doctor.checks.step.input_bound import input_bound
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, Target
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.render.header import model as heading
from fp8doctor.running import step_window
from tests.facts_of import DECODER_468M

STEPS = 3


class Work:
    """A clock in seconds, and a job that moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loads_s: float, computes_s: float) -> None:
        self.now, self.loads_s, self.computes_s = 0.0, loads_s, computes_s
        monkeypatch.setattr(step_window, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def facts(self, *, loader: bool = True) -> Facts:
        work = self

        class Rows(Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return STEPS

            def __getitem__(self, at: int) -> torch.Tensor:
                work.now += work.loads_s
                return torch.ones(4)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                work.now += work.computes_s
                output: torch.Tensor = self.up(x)
                return output

        model, rows = Net(), Rows()
        watched = step_window.StepWindow(STEPS, 1, (model,), capture=False)
        watched.begin()
        try:
            for batch in DataLoader(rows) if loader else (rows[at] for at in range(STEPS)):
                model(batch).sum().backward()
                watched.stepped()
        finally:
            watched.end()
        observed = watched.observation(("torch.optim.sgd.SGD",), 1.0)
        assert observed is not None
        return Facts(
            target=Target(kind="script", name="train.py"),
            gpus=(),
            network=DECODER_468M.network,
            training=DECODER_468M.training,
            workload=DECODER_468M.workload,
            environment=DECODER_468M.environment,
            observed=observed,
        )


def test_a_slow_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Work(monkeypatch, loads_s=0.03, computes_s=0.05).facts()
    finding = input_bound(facts)
    assert isinstance(finding, Finding)
    assert finding.title == "The step waits 30.0 of 80.0 ms for its data (38%)"
    assert finding.saving_ms is not None
    assert finding.saving_ms.high == pytest.approx(30)
    report = diagnose(facts)
    assert report.verdict.summary.startswith(
        "The step waits for its data 30.0 of 80.0 ms (38%). FP8 does not shorten that. Fix it first. "
        "FP8 is set up in "
    )
    assert "80.0 ms/step in 3 steps of the script" in heading(facts)


def test_a_quick_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Work(monkeypatch, loads_s=0.004, computes_s=0.05).facts()
    assert input_bound(facts) is None
    assert diagnose(facts).verdict.summary.startswith("FP8 is set up in ")


@pytest.mark.parametrize("loader", [True, False])
def test_tenths_of_a_ms_are_nobodys_wait(monkeypatch: pytest.MonkeyPatch, loader: bool) -> None:
    facts = Work(monkeypatch, loads_s=0.0004, computes_s=0.001).facts(loader=loader)
    assert not isinstance(input_bound(facts), Finding)
    assert diagnose(facts).verdict.summary.startswith("FP8 is set up in ")


def test_a_loader_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Work(monkeypatch, loads_s=0.03, computes_s=0.05).facts(loader=False)
    assert isinstance(input_bound(facts), NotApplicable)
    assert diagnose(facts).verdict.summary.startswith(
        "The step spends 30.0 ms (38%) before the model is called on something else: copies of the batch, "
        "logging, checkpoints, a loader that is not torch's. FP8 does not shorten that. Fix it first. "
    )
