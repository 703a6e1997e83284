"""What the profile of a script's own step asks torch for."""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import profiler

from fp8doctor.running import step_profiler


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
