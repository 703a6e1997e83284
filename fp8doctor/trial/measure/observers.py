"""Watch the GPU and the host while variants are timed.

NVML is asked once a block, between the launch of the last step and its end: the GPU is busy, and no step that
counts waits. It ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
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
            self._find()

    def _find(self) -> None:
        try:
            self._nvml = self._open.enter_context(open_nvml())
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        except Exception:  # no driver, another version of it than the library's, or an older torch
            return
        self._card = self._ask("DeviceGetHandleByUUID", f"GPU-{uuid.removeprefix('GPU-')}")

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Ask NVML; None if it has no answer."""
        try:
            return getattr(self._nvml, f"nvml{question}")(*arguments)
        except self._nvml.NVMLError:
            return None

    def look(self) -> None:
        """Take one sample, of the GPU first, which is busy now."""
        if self._card is not None:
            self._look_at_gpu(self._card)
        self._paces_ms.append(_pace_ms())

    def _look_at_gpu(self, card: Any) -> None:
        self._looks += 1
        mhz = self._ask("DeviceGetClockInfo", card, self._nvml.NVML_CLOCK_SM)
        self._mhz += [] if mhz is None else [mhz]
        # in a container this process cannot be distinguished from the others
        if used := self._ask("DeviceGetProcessUtilization", card, self._since):
            self._since = max(each.timeStamp for each in used)
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
