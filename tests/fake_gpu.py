"""A GPU that works off what the host launches, on a clock that the test sets."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch


class FakeGpu:
    """Times in ms. An event can be read once the host waited for it, as CUDA's."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = self.waited = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any = None) -> None:
                self.at = gpu.launched

            def synchronize(self) -> None:
                gpu.waited = max(gpu.waited, self.at)

            def elapsed_time(self, later: Event) -> float:
                if max(self.at, later.at) > gpu.waited:
                    raise RuntimeError("CUDA error: device not ready")
                return later.at - self.at

        for name, stand_in in {
            "Event": Event,
            "synchronize": self.synchronize,
            "device": lambda device: contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def synchronize(self, device: object = None) -> None:
        self.waited = self.launched

    def run(self, ms: float) -> None:
        self.launched += ms
