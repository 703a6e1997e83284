"""The GPU by a stand-in for NVML, and the host by a ``/proc`` and a cgroup that are written down."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pynvml  # type: ignore[import-untyped]
import pytest
import torch

from fp8doctor.examine.nvml_gpus import NoDriverError
from fp8doctor.facts import Trial, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial.measure import observers
from fp8doctor.trial.measure.observers import HostObserver, Observer
from tests.waiting import wait_for

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
    seen = observer.health()
    assert seen is not None
    assert (seen.samples, seen.sm_clock_low_mhz, seen.sm_clock_median_mhz, seen.sm_clock_high_mhz) == (
        3,
        1470,
        1755,
        1965,
    )
    assert (seen.power_median_w, seen.power_limit_w, seen.temperature_high_c) == (
        pytest.approx(657.158),
        700.0,
        51,
    )
    assert seen.throttled_pct == pytest.approx(
        {"software power cap": 200 / 3, "hardware thermal slowdown": 100 / 3}
    )
    assert (seen.other_processes, seen.other_use_pct) == (0, 0.0)
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
    assert (
        seen.samples,
        seen.sm_clock_median_mhz,
        seen.power_median_w,
        seen.power_limit_w,
        seen.other_use_pct,
    ) == (1, None, None, None, None)
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


TICKS = os.sysconf("SC_CLK_TCK")

Write = Callable[..., None]


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Two cores of four, of which the second is named too by what the process may use."""
    monkeypatch.setattr(observers, "PROC", tmp_path)
    monkeypatch.setattr(observers, "own_cores", lambda: {0, 1})

    def write(
        *,
        user: float,
        idle: float,
        steal: float = 0.0,
        own: float = 0.0,
    ) -> None:
        core = f"{user * TICKS / 2:.0f} 0 0 {idle * TICKS / 2:.0f} 0 0 0 {steal * TICKS / 2:.0f} 0 0"
        of_others = "999999 0 0 0 0 0 0 0 0 0"
        cores = [core, core, of_others, of_others]
        lines = [f"cpu  {of_others}", *(f"cpu{number} {each}" for number, each in enumerate(cores))]
        (tmp_path / "stat").write_text("\n".join([*lines, "intr 1 2 3"]))
        used = SimpleNamespace(user=own, system=0.0, children_user=0.0, children_system=0.0)
        monkeypatch.setattr(observers, "os", SimpleNamespace(**{**vars(os), "times": lambda: used}))

    return write


def at(clock_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        observers, "time", SimpleNamespace(monotonic=lambda: clock_s, perf_counter=lambda: clock_s)
    )


def test_a_window_is_what_was_counted_between_its_ends(linux: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = HostObserver()
    linux(user=100.0, idle=100.0, own=3.0)
    at(0.0, monkeypatch)
    with observer.window():
        observer.look()
        at(10.0, monkeypatch)
        linux(user=115.0, idle=104.0, steal=1.0, own=8.0)
    load = observer.load()
    assert (load.window_s, load.cores) == (10.0, 2)
    assert load.others_pct == pytest.approx(50.0)


def test_windows_are_summed_up(linux: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = HostObserver()
    for number in range(2):
        linux(user=10.0 * number, idle=0.0)
        at(10.0 * number, monkeypatch)
        with observer.window():
            observer.look()
            linux(user=10.0 * number + 1.0, idle=1.0)
            at(10.0 * number + 1, monkeypatch)
    load = observer.load()
    assert (load.window_s, load.others_pct) == (2.0, pytest.approx(50.0))
    assert len(observer.paces_ms) == 2


def test_a_system_that_tells_nothing_leaves_it_unrecorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(observers, "PROC", tmp_path / "absent")
    observer = HostObserver()
    with observer.window():
        observer.look()
    assert not recorded(Trial(host=observer.load()), "host")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux tells it")
def test_a_real_window_is_told() -> None:
    observer = HostObserver()

    def later() -> bool:
        observer.look()
        now = observers.counters()
        return now is not None and before is not None and now.total > before.total

    with observer.window():
        before = observers.counters()
        wait_for("the clock of the kernel's counters to tick", later)
    load = observer.load()
    assert 0 < load.pace_low_ms <= load.pace_median_ms
    assert 0 <= load.others_pct <= 100
    assert load.cores == len(observers.own_cores()) >= 1
