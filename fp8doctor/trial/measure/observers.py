"""Watch the GPU and the host while variants are timed.

NVML is asked once a block, between the launch of the last step and its end: the GPU is busy, and no step that
counts waits. It ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch

from fp8doctor.examine.nvml_gpus import THROTTLE_REASONS, open_nvml
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
        self._seen: dict[str, list[Any]] = defaultdict(list)
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
        reasons = self._ask("DeviceGetCurrentClocksEventReasons", card)
        if reasons is None:  # drivers before 535 know only the old function
            reasons = self._ask("DeviceGetCurrentClocksThrottleReasons", card)
        sample = {
            "mhz": self._ask("DeviceGetClockInfo", card, self._nvml.NVML_CLOCK_SM),
            "reasons": reasons,
        }
        for name, answer in sample.items():
            if answer is not None:
                self._seen[name].append(answer)
        # in a container this process cannot be distinguished from the others
        if used := self._ask("DeviceGetProcessUtilization", card, self._since):
            self._since = max(each.timeStamp for each in used)
            latest = {each.pid: each.smUtil for each in sorted(used, key=lambda each: each.timeStamp)}
            if latest.pop(os.getpid(), None) is not None:
                self._seen["share"].append(float(sum(latest.values())))

    def health(self) -> Health | None:
        """Sum up the samples of the GPU; None on a CPU, not recorded without NVML."""
        if self._device.type != "cuda" or not self._looks:
            unknown: Health | None = None if self._device.type != "cuda" else NOT_RECORDED
            return unknown
        mhz, reasons = self._seen["mhz"], self._seen["reasons"]
        held = {
            reason: 100 * sum(bool(bits & bit) for bits in reasons) / len(reasons)
            for bit, reason in THROTTLE_REASONS.items()
            if reasons
        }
        return Health(
            samples=self._looks,
            sm_clock_low_mhz=min(mhz, default=None),
            sm_clock_high_mhz=max(mhz, default=None),
            throttled_pct={reason: pct for reason, pct in held.items() if pct} if reasons else NOT_RECORDED,
            other_use_pct=max(self._seen["share"], default=None),
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
