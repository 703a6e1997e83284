"""STP009: a real trial, whose step is put together to wait for its host."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fp8doctor.analysis.noise import host_contention, host_doubt
from fp8doctor.checks.step.host_disturbed import SICK, host_disturbed
from fp8doctor.facts import Arm, Facts, HostLoad, Trial, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.step.profiled import BF16, profiled, replaced

QUIET = SICK.trial.host
WAITING = profiled("as_is", 41.5, host_wait_pct=92.0, gemm_fp8=4.0, cast=2.0, pointwise=8.5)
BF16_WAITING = profiled("bf16", 18.5, host_wait_pct=98.0, gemm_16bit=3.1, pointwise=3.5)
BUSY = profiled("as_is", 41.5, host_wait_pct=92.0, gemm_fp8=4.0, cast=26.0, pointwise=10.5)


def load(**fields: Any) -> HostLoad:
    return msgspec.structs.replace(QUIET, **{"others_pct": 10.0, **fields})


def trial(*arms: Arm, **fields: Any) -> Trial:
    return Trial(**{"device": "cuda", "arms": arms, "host": load(others_pct=94.0), **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"others_pct": 49.0, "steal_pct": 2.9, "waited_pct": 2.9, "throttled_pct": 2.9}, None),
        ({"others_pct": 94.0}, "others used 94% of the host's 16 cores"),
        ({"steal_pct": 12.0}, "the hypervisor took 12% of them"),
        ({"throttled_pct": 30.0}, "the quota of the container was used up in 30% of its periods"),
        ({"waited_pct": 7.0}, "a thread of the step waited for a core 7% of the time"),
        ({"waited_pct": None, "pace_median_ms": 0.6}, "Python ran 2.0 times as long as at its best"),
    ],
)
def test_what_disturbs_a_host(fields: dict[str, Any], words: str | None) -> None:
    assert host_contention(load(**fields)) == words


def test_it_matters_where_a_step_waits_for_the_host() -> None:
    assert host_doubt(trial(WAITING, BF16)) == (
        "the step waits for the host, and others used 94% of the host's 16 cores"
    )
    assert host_doubt(trial(BUSY, BF16_WAITING)) is not None
    assert host_doubt(trial(BUSY, BF16)) is None
    assert host_doubt(trial(WAITING, device="cpu")) is None
    assert host_doubt(trial(WAITING, host=load())) is None
    assert host_doubt(msgspec.structs.replace(trial(WAITING), host=NOT_RECORDED)) is None


def test_the_finding_names_the_step_and_the_numbers() -> None:
    finding = host_disturbed(
        Facts(trial=trial(BUSY, BF16_WAITING, host=load(others_pct=94.0, steal_pct=5.0)))
    )
    assert isinstance(finding, Finding)
    assert finding.title == (
        "Other load slowed the host while it limited the step: others used 94% of the host's 16 cores, the "
        "hypervisor took 5% of them"
    )
    assert finding.explanation.startswith("The BF16 step waits for the host. The trial timed it for 12 s")
    assert (finding.evidence["steal_pct"], finding.evidence["cores"]) == (5.0, 16)
    assert finding.treatment is None, "a quiet host is no change of the job"
    assert isinstance(host_disturbed(Facts(trial=trial(BUSY, BF16))), NotApplicable)


@pytest.mark.slow
def test_a_real_trial_counts_its_host(sick: Facts) -> None:
    assert recorded(sick, "trial.host")
    assert sick.trial.host.window_s > 0
    real = sick.trial.arms[0]
    assert real.breakdown is not None
    assert real.step_ms is not None
    waiting = replaced(real, idle_ms=real.step_ms, host_wait_pct=90.0)
    host = msgspec.structs.replace(sick.trial.host, others_pct=80.0)
    seen = msgspec.structs.replace(sick.trial, device="cuda", arms=(waiting,), host=host)
    finding = host_disturbed(msgspec.structs.replace(sick, trial=seen))
    assert isinstance(finding, Finding)
    assert f"others used 80% of the host's {host.cores} cores" in finding.title
