"""The GPU's health while arms are timed: clocks, power, heat, throttling, and who else was there.

One look per visit falls between the last step's launch and its end: the GPU is busy, and no step that counts
waits for NVML. NVML ignores ``CUDA_VISIBLE_DEVICES``, so the GPU is found by its UUID.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fp8doctor.examine.device import THROTTLE_REASONS, NoDriverError, count_others, open_nvml
from fp8doctor.facts import Health
from fp8doctor.facts.unrecorded import NOT_RECORDED


class Observer:
    """Looks at one GPU through NVML; sees nothing on a CPU, or where NVML does not answer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ExitStack()
        self._nvml: Any = None
        self._card: Any = None
        """The whole GPU: clocks, power and heat are its own."""
        self._part: Any = None
        """The MIG slice that is used, else the GPU: processes are counted there."""
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
            self._part = self._by_uuid(uuid)
            self._card = (
                self._ask(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, self._part) or self._part
            )
        except (NoDriverError, AttributeError):
            self._part = None
        except Exception as error:
            if not _is_nvmls(error):
                raise
            self._part = None

    def _by_uuid(self, uuid: str) -> Any:
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        found = (self._ask(self._nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{bare}") for kind in ("GPU", "MIG"))
        return next((handle for handle in found if handle is not None), None)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Ask NVML; None where it has no answer."""
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
        asked = (
            (self._clocks, self._ask(nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_SM)),
            (self._watts, self._ask(nvml.nvmlDeviceGetPowerUsage, card)),
            (self._celsius, self._ask(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU)),
            (self._reasons, self._throttled()),
        )
        for samples, answer in asked:
            if answer is not None:
                samples.append(answer)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, self._part)
        if processes is not None:
            self._others.append(count_others(processes, ours=True))
        self._look_at_others()

    def _throttled(self) -> int | None:
        """Read the bits of the reasons; drivers before 535 know only the old name."""
        bits: int | None = self._ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, self._card)
        if bits is None:
            bits = self._ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._card)
        return bits

    def _look_at_others(self) -> None:
        """Note what other processes used since the last look, in percent. In a container this one cannot be
        told from them."""
        used = self._ask(self._nvml.nvmlDeviceGetProcessUtilization, self._card, self._since)
        if not used:
            return
        self._since = max(each.timeStamp for each in used)
        latest = {each.pid: each.smUtil for each in sorted(used, key=lambda each: each.timeStamp)}
        if os.getpid() in latest:
            self._shares.append(float(sum(share for pid, share in latest.items() if pid != os.getpid())))

    def health(self) -> Health | None:
        """Sum up what was seen; None on a CPU, not recorded where NVML does not answer."""
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
        """Let go of NVML."""
        self._part = None
        self._open.close()


def _is_nvmls(error: Exception) -> bool:
    return any(cls.__name__ == "NVMLError" for cls in type(error).__mro__)
