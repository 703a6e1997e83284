"""A window on CUDA: a GPU works off what the host launches, and nothing else moves their clocks; then the
profile of a step: the settings of torch's profiler, and the end of CUPTI."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.utils.data import DataLoader

from fp8doctor.facts import Observation
from fp8doctor.running import step_profiler, step_window
from fp8doctor.running.losses import Losses
from fp8doctor.running.step_window import Clock

STEPS = 4


class Machine:
    """A host and a GPU; times in ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.gpu_done = 0.0
        self.capturing = False
        machine = self

        class Event:
            """Reached when all work before it is done."""

            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                self.reached = max(machine.host, machine.gpu_done)

            def synchronize(self) -> None:
                machine.host = max(machine.host, self.reached)

            def elapsed_time(self, later: Event) -> float:
                assert machine.host >= later.reached, "CUDA raises for an event that is not reached"
                return later.reached - self.reached

        monkeypatch.setattr(step_window, "time", SimpleNamespace(perf_counter=lambda: self.host / 1e3))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(step_window, "Clock", lambda device: Clock(torch.device("cuda")))

    def launch(self, host_ms: float, gpu_ms: float) -> None:
        self.host += host_ms
        self.gpu_done = max(self.host, self.gpu_done) + gpu_ms

    def wait(self) -> None:
        """As ``loss.item()`` does."""
        self.host = max(self.host, self.gpu_done)

    def watched(self, step: Callable[[nn.Module], None]) -> Observation:
        """Some steps of a job."""

        class Net(nn.Module):
            def forward(self, host_ms: float, gpu_ms: float) -> None:
                machine.launch(host_ms, gpu_ms)

        machine, model = self, Net()
        owner: Any = SimpleNamespace(model=model, share=1.0, callable=(model,))
        watched = step_window.StepWindow(STEPS, owner, Losses())
        watched.begin()
        try:
            for _ in range(STEPS):
                step(model)
                watched.stepped()
        finally:
            watched.end()
        observed = watched.observation()
        assert observed is not None
        return observed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(("capturing", "clock"), [(False, "cuda"), (True, "host")])
def test_a_job_whose_gpu_waits_for_the_host(machine: Machine, capturing: bool, clock: str) -> None:
    """A step that is captured as a CUDA graph is timed by the host."""

    def step(model: nn.Module) -> None:
        machine.capturing = capturing
        model(40.0, 5.0)
        machine.launch(5.0, 0.0)

    seen = machine.watched(step)
    assert seen.steps_ms == pytest.approx((45, 45, 45, 45))
    assert seen.clock == clock
    assert (seen.behind_ms, seen.peak_gib) == ((None, None) if capturing else (pytest.approx((0,) * 4), 3.0))


@pytest.mark.parametrize(("gpu_ms", "waited"), [(80.0, 0.0), (20.0, 10.0)])
def test_a_wait_for_data_that_the_gpu_works_through(machine: Machine, gpu_ms: float, waited: float) -> None:
    class Rows:
        def __len__(self) -> int:
            return 2 * STEPS

        def __getitem__(self, at: int) -> torch.Tensor:
            machine.host += 30
            return torch.ones(1)

    batches = iter(DataLoader(Rows()))  # type: ignore[arg-type]

    def step(model: nn.Module) -> None:
        for _ in range(2):  # micro-batches
            next(batches)
            model(1.0, gpu_ms)

    seen = machine.watched(step)
    assert seen.data_ms is not None
    assert seen.data_ms[1:] == pytest.approx((2 * waited,) * 3)


def test_kernels_are_recorded_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kineto torch falls back to events around operators, and its trace holds no kernel."""
    asked: list[dict[str, Any]] = []

    class Asked(profiler.profile):
        def __init__(self, **settings: Any) -> None:
            asked.append(settings)
            super().__init__(**{**settings, "use_device": None})  # a CPU has no other

    monkeypatch.setattr(step_profiler, "profile", Asked)
    watched = step_profiler.StepProfiler(on_gpu=True, step_ms=1.0)
    watched.begin()
    watched.end()
    assert [(each["use_device"], each["use_kineto"]) for each in asked] == [("cuda", True)]
