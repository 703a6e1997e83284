"""CUPTI is detached when the profiled step ends, and the environment is as before."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

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
