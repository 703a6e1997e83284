"""A stand-in for NVML: GPUs that this machine does not have, answered for in the words of the real
``pynvml``.

Constants, error classes and structure fields are pynvml's own. A question that a card has no answer for
raises ``NVMLError_NotSupported``, as the library does; an answer that is an exception is raised.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 2**30


@dataclass(eq=False)
class Device:
    """A GPU, or a MIG slice of one."""

    uuid: str
    name: Any
    answers: dict[str, Any] = field(default_factory=dict)


def gpu(name: str, uuid: str, capability: tuple[int, int], memory_gib: float, **answers: Any) -> Device:
    """A healthy, idle GPU; ``answers`` replaces what NVML says of it, by the name of the function."""
    return Device(
        uuid,
        name,
        {
            "nvmlDeviceGetCudaComputeCapability": capability,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(
                total=memory_gib * GIB, used=0.5 * GIB, free=(memory_gib - 0.5) * GIB
            ),
            "nvmlDeviceGetPowerManagementLimit": 400_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 400_000,
            "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetMigMode": (0, 0),
            **answers,
        },
    )


def a100(uuid: str = "GPU-a1000000-0000-0000-0000-000000000000", **answers: Any) -> Device:
    return gpu("NVIDIA A100-SXM4-80GB", uuid, (8, 0), 80, **answers)


def h100(uuid: str = "GPU-b1000000-0000-0000-0000-000000000000", **answers: Any) -> Device:
    return gpu("NVIDIA H100 80GB HBM3", uuid, (9, 0), 80, **answers)


class StandIn:
    """What ``import pynvml`` gives while it is installed."""

    def __init__(
        self, *devices: Device, driver: str = "580.159.03", on_init: Exception | None = None
    ) -> None:
        self.devices = devices
        self.driver = driver
        self.on_init = on_init
        self.opened = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> StandIn:
        monkeypatch.setitem(sys.modules, "pynvml", self)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDevice"):
            return lambda device, *_: self._answer(device, name)
        return getattr(pynvml, name)

    def _answer(self, device: Device, name: str) -> Any:
        assert self.opened, f"{name} outside nvmlInit and nvmlShutdown"
        answer = device.answers.get(name, pynvml.NVMLError_NotSupported())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def nvmlInit(self) -> None:  # noqa: N802
        if self.on_init:
            raise self.on_init
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        device = self.devices[index]
        if isinstance(device.name, Exception):
            raise device.name
        return device

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:  # noqa: N802
        for device in self.devices:
            if device.uuid == uuid:
                return device
        raise pynvml.NVMLError_NotFound

    def nvmlDeviceGetUUID(self, device: Device) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetName(self, device: Device) -> str:  # noqa: N802
        return str(device.name)
