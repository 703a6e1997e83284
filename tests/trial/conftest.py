"""Trials that are short, a clock that only a step moves, and compiled code that is forgotten."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8doctor.trial.measure import bench, timer
from tests.trial.planted import CLOCK


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "MOST_WARM_UP", bench.LEAST_WARM_UP)
    monkeypatch.setattr(timer, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timer, "MOST_ROUNDS", 2)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors on a shared machine: more threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))
