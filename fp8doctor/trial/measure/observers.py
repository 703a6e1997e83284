"""Watch the GPU and the host while variants are timed.

NVML is asked once a block, between the launch of the last step and its end: the GPU is busy, and no step that
counts waits. It ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID. Linux counts since the
start of the machine, so its counters are read at both ends of a window.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8doctor.examine.nvml_gpus import THROTTLE_REASONS, count_others, open_nvml
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
        """The whole GPU, for clocks, power and heat."""
        self._part: Any = None
        """The MIG slice in use, else the GPU, for processes."""
        self._clocks: list[int] = []
        self._watts: list[float] = []
        self._celsius: list[int] = []
        self._reasons: list[int] = []
        self._others: list[int] = []
        self._shares: list[float] = []
        self._looks = self._since = 0
        if device.type == "cuda":
            self._find()

    def _find(self) -> None:
        try:
            self._nvml = self._open.enter_context(open_nvml())
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        except Exception:  # no driver, another version of it than the library's, or an older torch
            return
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for kind in ("GPU", "MIG"):
            self._part = self._part or self._ask(self._nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{bare}")
        if self._part is not None:
            whole = self._ask(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, self._part)
            self._card = whole or self._part

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Ask NVML; None if it has no answer."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None

    def look(self) -> None:
        """Take one sample."""
        if self._part is None:
            return
        nvml, card = self._nvml, self._card
        self._looks += 1
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, card)
        if reasons is None:  # drivers before 535 know only the old function
            reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, card)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, self._part)
        others = None if processes is None else count_others(processes, ours=True)
        for samples, answer in (
            (self._clocks, self._ask(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_SM)),
            (self._watts, self._ask(nvml.nvmlDeviceGetPowerUsage, card)),
            (self._celsius, self._ask(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU)),
            (self._reasons, reasons),
            (self._others, others),
        ):
            if answer is not None:
                samples.append(answer)
        # in a container this process cannot be distinguished from the others
        if used := self._ask(nvml.nvmlDeviceGetProcessUtilization, card, self._since):
            self._since = max(each.timeStamp for each in used)
            latest = {each.pid: each.smUtil for each in sorted(used, key=lambda each: each.timeStamp)}
            if latest.pop(os.getpid(), None) is not None:
                self._shares.append(float(sum(latest.values())))

    def health(self) -> Health | None:
        """Sum up the samples; None on a CPU, not recorded without NVML."""
        if self._device.type != "cuda" or not self._looks:
            unknown: Health | None = None if self._device.type != "cuda" else NOT_RECORDED
            return unknown
        limit = self._ask(self._nvml.nvmlDeviceGetPowerManagementLimit, self._card)
        held = {
            reason: 100 * sum(bool(bits & bit) for bits in self._reasons) / len(self._reasons)
            for bit, reason in THROTTLE_REASONS.items()
            if self._reasons
        }
        return Health(
            samples=self._looks,
            sm_clock_low_mhz=min(self._clocks, default=None),
            sm_clock_median_mhz=round(statistics.median(self._clocks)) if self._clocks else None,
            sm_clock_high_mhz=max(self._clocks, default=None),
            power_median_w=statistics.median(self._watts) / 1000 if self._watts else None,
            power_limit_w=limit / 1000 if limit is not None else None,
            temperature_high_c=max(self._celsius, default=None),
            throttled_pct={reason: share for reason, share in held.items() if share}
            if self._reasons
            else NOT_RECORDED,
            other_processes=max(self._others) if self._others else NOT_RECORDED,
            other_use_pct=max(self._shares, default=None),
        )

    def close(self) -> None:
        self._part = None
        self._open.close()


@dataclass
class HostObserver:
    paces_ms: list[float] = field(default_factory=list)

    def look(self) -> None:
        """Take one sample."""
        began, value = time.perf_counter(), 1
        for number in range(PACE_LOOPS):
            value = (value * 3 + number) & 0xFFFF
        self.paces_ms.append((time.perf_counter() - began) * 1e3)

    def load(self) -> HostLoad:
        if not self.paces_ms:
            unknown: HostLoad = NOT_RECORDED
            return unknown
        return HostLoad(pace_low_ms=min(self.paces_ms), pace_median_ms=statistics.median(self.paces_ms))
