"""The GPU by a stand-in for NVML, and the pace of the host."""

import os
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest
import torch

from fp8doctor.facts import NOT_RECORDED, Health
from fp8doctor.trial.measure.timer import Observer
from tests.stand_ins.nvml import StandIn, h100

CUDA = torch.device("cuda", 0)
UUID = "11111111-2222-3333-4444-555555555555"
OURS = SimpleNamespace(pid=os.getpid(), smUtil=60, timeStamp=1)
OTHER = SimpleNamespace(pid=1, smUtil=35, timeStamp=1)


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    StandIn(h100(f"GPU-{UUID}")).install(monkeypatch)
    return Observer(CUDA)


def looked(observer: Observer, *looks: dict[str, Any]) -> Health:
    """What it sums up after these answers of NVML."""
    for answers in looks:
        observer._card.answers = {f"nvmlDeviceGet{name}": answer for name, answer in answers.items()}
        observer.look()
    health = observer.health()
    assert health is not None
    return health


def test_three_looks_are_summed_up(observer: Observer) -> None:
    looks = [{"ProcessUtilization": [OURS], "ClockInfo": clock} for clock in (1755, 1470, 1965)]
    assert looked(observer, *looks) == Health(
        samples=3,
        sm_clock_low_mhz=1470,
        sm_clock_high_mhz=1965,
        other_use_pct=0.0,
    )
    nvml = observer._nvml
    observer.close()
    assert not nvml.opened


def test_another_process_and_what_it_uses(observer: Observer) -> None:
    assert looked(observer, {"ProcessUtilization": [OURS, OTHER]}).other_use_pct == 35.0


def test_what_nvml_does_not_answer_is_not_made_up(observer: Observer) -> None:
    seen = looked(observer, {})
    assert seen.samples == 1
    assert (seen.sm_clock_low_mhz, seen.other_use_pct) == (None, None)


def test_without_a_driver_or_a_gpu_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(on_init=pynvml.NVMLError_DriverNotLoaded()).install(monkeypatch)
    for device, nothing in ((CUDA, NOT_RECORDED), (torch.device("cpu"), None)):
        observer = Observer(device)
        observer.look()
        assert observer.health() is nothing


def test_the_pace_of_the_host_is_told() -> None:
    observer = Observer(torch.device("cpu"))
    assert observer.host() is NOT_RECORDED
    for _ in range(3):
        observer.look()
    load = observer.host()
    assert 0 < load.pace_low_ms <= load.pace_median_ms
