"""GPU004 on GPUs that a stand-in NVML reports to the real examine, and on what a trial saw of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest

from fp8doctor.analysis.noise import SLOWDOWNS, gpu_contention
from fp8doctor.checks.device.gpu_held_back import AT_REST
from fp8doctor.examine import examine_surroundings
from fp8doctor.examine.nvml_gpus import THROTTLE_REASONS
from fp8doctor.facts import Facts, Health, Target, Trial
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins.nvml import Device, StandIn, gpu, sliced


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def h200(**answers: Any) -> Device:
    limits = {
        "nvmlDeviceGetPowerManagementLimit": 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
        "nvmlDeviceGetMaxClockInfo": 1980,
    }
    return gpu("NVIDIA H200", "GPU-c1", (9, 0), 141, **{**limits, **answers})


def machine(monkeypatch: pytest.MonkeyPatch, *devices: Device, **seen: Any) -> Facts:
    """The facts of a machine, with the health that a trial saw if there is any."""
    StandIn(*devices).install(monkeypatch)
    facts = examine_surroundings(Target(kind="environment", name="environment"))
    if not seen:
        return facts
    health = Health(
        samples=120,
        sm_clock_median_mhz=1605,
        power_limit_w=700.0,
        **{"throttled_pct": {}, "other_processes": 0, "other_use_pct": None, **seen},
    )
    return msgspec.structs.replace(
        facts, trial=Trial(device="cuda", gpu="NVIDIA H200", arms=(), health=health)
    )


def test_the_power_cap_of_heavy_gemms_is_no_disease(monkeypatch: pytest.MonkeyPatch) -> None:
    working = h200(nvmlDeviceGetCurrentClocksEventReasons=pynvml.nvmlClocksEventReasonSwPowerCap)
    assert outcome_of("GPU004", machine(monkeypatch, working)).outcome == "healthy"
    assert (
        outcome_of(
            "GPU004", machine(monkeypatch, working, throttled_pct={"software power cap": 97.0})
        ).outcome
        == "healthy"
    )


def test_a_lowered_limit_and_the_line_that_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = finding_of("GPU004", machine(monkeypatch, h200(nvmlDeviceGetPowerManagementLimit=450_000)))
    assert finding is not None
    assert (finding.severity, finding.title) == (
        "warning",
        "NVIDIA H200 runs with a power limit of 450 W, 700 W by default",
    )
    assert "comparison holds" in finding.explanation
    assert finding.treatment is not None
    assert "nvidia-smi -i 0 -pl 700" in finding.treatment.code
    assert finding_of("GPU004", machine(monkeypatch, h200())) is None


@pytest.mark.parametrize(
    "reason",
    ["hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"],
)
def test_slowed_while_it_was_timed(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    finding = finding_of(
        "GPU004", machine(monkeypatch, h200(), throttled_pct={"software power cap": 60.0, reason: 35.0})
    )
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == f"NVIDIA H200 runs with {reason} (35% of the time)"
    assert "unreliable" in finding.explanation
    assert finding.evidence["sm_clock_median_mhz"] == 1605
    assert (
        outcome_of("GPU004", machine(monkeypatch, h200(), throttled_pct={reason: 5.0})).outcome == "healthy"
    )


def test_too_hot_before_anything_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = h200(
        nvmlDeviceGetCurrentClocksEventReasons=pynvml.nvmlClocksEventReasonSwThermalSlowdown
        | pynvml.nvmlClocksEventReasonHwSlowdown
    )
    finding = finding_of("GPU004", machine(monkeypatch, hot))
    assert finding is not None
    assert finding.title == "NVIDIA H200 runs with software thermal slowdown"
    assert "unreliable" not in finding.explanation


def test_one_look_at_a_hardware_slowdown_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    changing = h200(nvmlDeviceGetCurrentClocksEventReasons=pynvml.nvmlClocksEventReasonHwSlowdown)
    assert outcome_of("GPU004", machine(monkeypatch, changing)).outcome == "healthy"


@pytest.mark.parametrize(
    ("others", "use", "severity"),
    [(2, 40.0, "warning"), (1, None, "info"), (1, 0.0, None), (0, None, None)],
    ids=["at work", "use unknown", "idle", "alone"],
)
def test_others_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, others: int, use: float | None, severity: str | None
) -> None:
    finding = finding_of("GPU004", machine(monkeypatch, h200(), other_processes=others, other_use_pct=use))
    assert (finding.severity if finding else None) == severity
    if finding:
        assert f"{others} other process" in finding.title
        assert finding.treatment is not None
        assert "--query-compute-apps" in finding.treatment.code


def test_processes_before_the_trial_disturbed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = h200(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=999_999)])
    assert machine(monkeypatch, busy).gpus[0].other_processes == 1
    assert outcome_of("GPU004", machine(monkeypatch, busy)).outcome == "healthy"


def test_a_slice_is_information(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = finding_of("GPU004", machine(monkeypatch, sliced(h200(), "MIG-1")))
    assert finding is not None
    assert (finding.severity, finding.treatment) == ("info", None)
    assert finding.title == "NVIDIA H200 MIG 1g.10gb runs with only a MIG slice"


def test_the_gpu_that_was_timed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = gpu(
        "NVIDIA L40S",
        "GPU-d1",
        (8, 9),
        48,
        nvmlDeviceGetPowerManagementLimit=200_000,
        nvmlDeviceGetPowerManagementDefaultLimit=350_000,
    )
    assert outcome_of("GPU004", machine(monkeypatch, capped, h200(), throttled_pct={})).outcome == "healthy"
    assert outcome_of("GPU004", machine(monkeypatch, capped, h200())).outcome == "sick"


def test_without_a_gpu_there_is_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of("GPU004", machine(monkeypatch)).outcome == "not_applicable"


def test_reasons_are_spelled_as_examine_spells_them() -> None:
    assert {*SLOWDOWNS, *AT_REST} <= set(THROTTLE_REASONS.values())


def test_limits_that_nvml_does_not_tell_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = h200(nvmlDeviceGetPowerManagementLimit=pynvml.NVMLError_Unknown())
    assert outcome_of("GPU004", machine(monkeypatch, silent)).outcome == "unknown"


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (None, None),
        (Health(throttled_pct={"power cap": 90.0}, other_use_pct=None), None),
        (Health(throttled_pct={"hardware thermal slowdown": 9.0}, other_use_pct=2.0), None),
        (
            Health(throttled_pct={"hardware thermal slowdown": 40.0}, other_use_pct=None),
            "hardware thermal slowdown in 40% of the samples",
        ),
        (Health(throttled_pct={}, other_use_pct=30.0), "other processes used up to 30% of the GPU"),
    ],
)
def test_a_disturbed_trial_is_unreliable(health: Health | None, words: str | None) -> None:
    assert gpu_contention(health) == words
