"""Profile a step of a script: the settings of torch's profiler, and the end of CUPTI."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
from torch.autograd import profiler

from fp8doctor.running import step_profiler
from fp8doctor.running.step_profiler import TEARDOWN, detaching

GRAPHS = "torch._inductor.cudagraph_trees"


@pytest.mark.parametrize(
    ("own", "graphs", "inside"), [(None, False, "1"), ("0", False, "0"), (None, True, None)]
)
def test_kineto_is_asked_to_detach_while_the_profile_ends(
    own: str | None, graphs: bool, inside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not against a setting of the user's own, nor beside CUDA graphs."""
    monkeypatch.delenv(TEARDOWN, raising=False)
    monkeypatch.delitem(sys.modules, GRAPHS, raising=False)
    if own is not None:
        monkeypatch.setenv(TEARDOWN, own)
    if graphs:
        monkeypatch.setitem(sys.modules, GRAPHS, ModuleType(GRAPHS))
    with suppress(ZeroDivisionError), detaching():
        seen = os.environ.get(TEARDOWN)
        raise ZeroDivisionError
    assert (seen, os.environ.get(TEARDOWN)) == (inside, own)


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
