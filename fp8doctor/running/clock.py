"""The clock of a window: moments of the host, and on CUDA of the GPU too, noted without waiting for it.

An event that is recorded where the host stands is reached by the GPU when all work launched before is done.
Nothing is read before the window's end, so that the job runs as it would.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

_log = logging.getLogger("fp8doctor")


@dataclass(frozen=True)
class Moment:
    """Where host and GPU stood."""

    host_s: float
    event: Any
    """Reached by the GPU after all work launched before; None without a GPU."""


class Clock:
    """Notes moments; the GPU's are told after `settle`. Nothing that fails here reaches the script."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._last: tuple[Any, float] | None = None

    @property
    def on_gpu(self) -> bool:
        return self._device is not None

    def now(self) -> Moment:
        """Note where host and GPU stand, in the stream that the script uses here."""
        event = None
        if self._device is not None:
            try:
                event = _event(self._device)
            except Exception:
                _log.debug("the GPU's clock could not be used", exc_info=True)
            if event is None:
                self._device = None
        return Moment(time.perf_counter(), event)

    def peak_gib(self) -> float | None:
        """Tell the most memory that torch has allocated on the GPU; None without one."""
        return torch.cuda.max_memory_allocated(self._device) / 2**30 if self.on_gpu else None

    def settle(self, last: Moment) -> None:
        """Wait until the GPU has come to the last of the moments; by it both clocks are laid together."""
        if self.on_gpu:
            last.event.synchronize()
            self._last = last.event, time.perf_counter()

    def host_ms(self, first: Moment, last: Moment) -> float:
        """What lies between two moments on the host."""
        return (last.host_s - first.host_s) * 1e3

    def ms(self, first: Moment, last: Moment) -> float:
        """What lies between two moments on the GPU; on the host without one."""
        if not self.on_gpu:
            return self.host_ms(first, last)
        return max(0.0, float(first.event.elapsed_time(last.event)))

    def behind_ms(self, moment: Moment) -> float:
        """How much later than the host the GPU came to a moment; 0 without a GPU."""
        if self._last is None:
            return 0.0
        event, reached_s = self._last
        return max(0.0, (reached_s - moment.host_s) * 1e3 - float(moment.event.elapsed_time(event)))


def _event(device: torch.device) -> Any:
    """Record an event; None while the script records a CUDA graph, of which it would become a part."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
