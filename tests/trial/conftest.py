"""Trials that are as short as can be, and compiled code that is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8doctor.trial.measure import bench, timer


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
