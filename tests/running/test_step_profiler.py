"""Profile a step of a script: the settings of torch's profiler, and the end of CUPTI."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
from torch.autograd import profiler

from fp8doctor.running import step_profiler
from fp8doctor.running.step_profiler import TEARDOWN, detaching

GRAPHS = "torch._inductor.cudagraph_trees"


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEARDOWN, raising=False)
    monkeypatch.delitem(sys.modules, GRAPHS, raising=False)


def test_kineto_is_asked_to_detach_while_the_profile_ends() -> None:
    seen = []

    def ends() -> None:
        with detaching():
            seen.append(os.environ[TEARDOWN])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ends()
    assert seen == ["1"]
    assert TEARDOWN not in os.environ


def test_a_setting_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEARDOWN, "0")
    with detaching():
        assert os.environ[TEARDOWN] == "0"
    assert os.environ[TEARDOWN] == "0"


def test_nothing_is_detached_beside_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, GRAPHS, ModuleType(GRAPHS))
    with detaching():
        assert TEARDOWN not in os.environ


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
