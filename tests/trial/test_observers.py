"""The GPU by a stand-in for NVML, and the host by a ``/proc`` and a cgroup that are written down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pynvml  # type: ignore[import-untyped]
import pytest
import torch

from fp8doctor.examine.nvml_gpus import NoDriverError
from fp8doctor.facts import Health, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial.measure import observers
from fp8doctor.trial.measure.observers import HostObserver, Observer

CUDA = torch.device("cuda", 0)
UUID = "11111111-2222-3333-4444-555555555555"


def answers() -> SimpleNamespace:
    """A stand-in for NVML and one GPU, whose hardware cannot be had here."""

    def by_uuid(uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise pynvml.NVMLError_NotFound
        return "card"

    clocks, reasons = iter((1755, 1470, 1965)), iter((0x4, 0x4 | 0x40, 0x0))
    stand_in = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        NVML_CLOCK_SM=pynvml.NVML_CLOCK_SM,
        NVML_TEMPERATURE_GPU=pynvml.NVML_TEMPERATURE_GPU,
        open=False,
        processes=[os.getpid()],
        used=[SimpleNamespace(pid=os.getpid(), smUtil=99, timeStamp=1)],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=refuse,
        nvmlDeviceGetClockInfo=lambda handle, kind: next(clocks),
        nvmlDeviceGetPowerUsage=lambda handle: 657158,
        nvmlDeviceGetPowerManagementLimit=lambda handle: 700000,
        nvmlDeviceGetTemperature=lambda handle, kind: 51,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: next(reasons),
    )
    stand_in.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid) for pid in stand_in.processes
    ]
    stand_in.nvmlDeviceGetProcessUtilization = lambda handle, since: stand_in.used
    return stand_in


def refuse(*arguments: object) -> None:
    raise pynvml.NVMLError_NotSupported


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    stand_in = answers()

    @contextmanager
    def opened() -> Iterator[SimpleNamespace]:
        stand_in.open = True
        yield stand_in
        stand_in.open = False

    monkeypatch.setattr(observers, "open_nvml", opened)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return stand_in


def test_three_looks_are_summed_up(nvml: SimpleNamespace) -> None:
    observer = Observer(CUDA)
    for _ in range(3):
        observer.look()
    assert observer.health() == Health(
        samples=3,
        sm_clock_low_mhz=1470,
        sm_clock_median_mhz=1755,
        sm_clock_high_mhz=1965,
        power_median_w=pytest.approx(657.158),
        power_limit_w=700.0,
        temperature_high_c=51,
        throttled_pct=pytest.approx({"software power cap": 200 / 3, "hardware thermal slowdown": 100 / 3}),
        other_processes=0,
        other_use_pct=0.0,
    )
    observer.close()
    assert not nvml.open


def test_another_process_and_what_it_uses(nvml: SimpleNamespace) -> None:
    nvml.processes = [os.getpid(), 1]
    nvml.used = [
        SimpleNamespace(pid=os.getpid(), smUtil=60, timeStamp=1),
        SimpleNamespace(pid=1, smUtil=35, timeStamp=1),
    ]
    observer = Observer(CUDA)
    observer.look()
    seen = observer.health()
    assert seen is not None
    assert (seen.other_processes, seen.other_use_pct) == (1, 35.0)


def test_what_nvml_does_not_answer_is_not_made_up(nvml: SimpleNamespace) -> None:
    for question in [
        name for name in vars(nvml) if name.startswith("nvmlDeviceGet") and "Handle" not in name
    ]:
        setattr(nvml, question, refuse)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = refuse
    observer = Observer(CUDA)
    observer.look()
    seen = observer.health()
    assert seen is not None
    assert seen.samples == 1
    unknown = (seen.sm_clock_median_mhz, seen.power_median_w, seen.power_limit_w, seen.other_use_pct)
    assert unknown == (None, None, None, None)
    assert not recorded(seen, "throttled_pct")
    assert not recorded(seen, "other_processes")


def test_without_a_driver_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> None:
        raise NoDriverError

    monkeypatch.setattr(observers, "open_nvml", closed)
    observer = Observer(CUDA)
    observer.look()
    assert observer.health() is NOT_RECORDED


def test_a_cpu_has_no_health() -> None:
    observer = Observer(torch.device("cpu"))
    observer.look()
    assert observer.health() is None


def test_the_pace_of_the_host_is_told() -> None:
    observer = HostObserver()
    assert observer.load() is NOT_RECORDED
    for _ in range(3):
        observer.look()
    load = observer.load()
    assert 0 < load.pace_low_ms <= load.pace_median_ms
