"""A GPU that works off what the host launches, on a clock that the test sets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

L2_BYTES = 50 * 2**20


class FakeGpu:
    """Times in ms. An event can be read once the host waited for it, as CUDA's."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = self.waited = 0.0
        self.cached = False
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
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=L2_BYTES),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def synchronize(self, device: object = None) -> None:
        self.waited = self.launched

    def run(self, ms: float) -> None:
        self.launched += ms

    def buffer(self, size: int, **settings: Any) -> Any:
        """Stand in for a tensor of bytes, which empties the L2 cache if it is written and large enough."""

        def write() -> None:
            self.cached = self.cached and size < L2_BYTES
            self.run(1.0)

        return SimpleNamespace(zero_=write)

    def read(self, cold_ms: float, warm_ms: float) -> None:
        """Run a kernel whose operands may lie in the L2 cache."""
        self.run(warm_ms if self.cached else cold_ms)
        self.cached = True
