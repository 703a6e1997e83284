"""Watch the GPU and the host while variants are timed.

NVML is asked once a block, between the launch of the last step and its end: the GPU is busy, and no step that
counts waits. It ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack, suppress
from typing import Any

import torch

from fp8doctor.examine.nvml_gpus import open_nvml
from fp8doctor.facts import Health, HostLoad
from fp8doctor.facts.unrecorded import NOT_RECORDED

PACE_LOOPS = 5000
"""Rounds of the fixed piece of Python: about 0.3 ms, which is less than most steps take."""


class Observer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ExitStack()
        self._nvml: Any = None
        self._card: Any = None
        self._mhz: list[int] = []
        self._shares: list[float] = []
        self._looks = self._since = 0
        self._paces_ms: list[float] = []
        if device.type == "cuda":
            with suppress(Exception):  # no driver, another version than the library's, or an older torch
                self._nvml = self._open.enter_context(open_nvml())
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                self._card = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

    def look(self) -> None:
        """Take one sample, of the GPU first, which is busy now."""
        if self._card is not None:
            self._looks += 1
            with suppress(self._nvml.NVMLError):
                self._mhz.append(self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM))
            with suppress(self._nvml.NVMLError):
                self._note(self._nvml.nvmlDeviceGetProcessUtilization(self._card, self._since))
        self._paces_ms.append(_pace_ms())

    def _note(self, used: Any) -> None:
        """Note what other processes use, if this one is among them: not in a container."""
        self._since = max((each.timeStamp for each in used), default=self._since)
        latest = {each.pid: each.smUtil for each in sorted(used, key=lambda each: each.timeStamp)}
        if latest.pop(os.getpid(), None) is not None:
            self._shares.append(float(sum(latest.values())))

    def health(self) -> Health | None:
        """Sum up the samples of the GPU; None on a CPU, not recorded without NVML."""
        if self._device.type != "cuda" or not self._looks:
            unknown: Health | None = None if self._device.type != "cuda" else NOT_RECORDED
            return unknown
        return Health(
            samples=self._looks,
            sm_clock_low_mhz=min(self._mhz, default=None),
            sm_clock_high_mhz=max(self._mhz, default=None),
            other_use_pct=max(self._shares, default=None),
        )

    def host(self) -> HostLoad:
        if not self._paces_ms:
            unknown: HostLoad = NOT_RECORDED
            return unknown
        return HostLoad(pace_low_ms=min(self._paces_ms), pace_median_ms=statistics.median(self._paces_ms))

    def close(self) -> None:
        self._card = None
        self._open.close()


def _pace_ms() -> float:
    """Time a fixed piece of Python."""
    began, value = time.perf_counter(), 1
    for number in range(PACE_LOOPS):
        value = (value * 3 + number) & 0xFFFF
    return (time.perf_counter() - began) * 1e3
