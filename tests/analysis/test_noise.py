"""A disturbed host that made the compared steps noisy, or turned which of them is faster."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec
import pytest

from fp8doctor.analysis.noise import host_doubt
from fp8doctor.analysis.step_difference import waits_for_the_host
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, HostLoad
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.render.certainty import certainty
from tests.checks.arms import timed
from tests.checks.step.profiled import profiled, replaced
from tests.checks.step.test_host_disturbed import WAITING, load
from tests.diagnosis.trials import Of, without_fp8
from tests.facts_of import DECODER_468M


def rounds(arm: Arm, *rounds_ms: float) -> Arm:
    return msgspec.structs.replace(
        arm, rounds_ms=rounds_ms, low_ms=min(rounds_ms), high_ms=max(rounds_ms), step_ms=median(rounds_ms)
    )


FLUX_LIKE = rounds(
    profiled("as_is", 67.4, host_wait_pct=96.5, gemm_fp8=19.7, cast=15.9, attention=7.0, pointwise=17.1),
    *(67.6, 67.4, 67.0, 69.7, 63.0),
)
ITS_BF16 = rounds(
    profiled("bf16_compiled", 65.8, host_wait_pct=95.1, gemm_16bit=37.2, attention=7.1, pointwise=17.2),
    *(66.3, 65.6, 66.7, 65.8, 65.8),
)
"""A 1.7B image model on an H200 whose host was slow: too noisy to tell, and too busy to wait for the host."""
SLOW = load(pace_median_ms=0.53)
STEADY = rounds(replaced(FLUX_LIKE, idle_ms=6.3), *(66.2, 66.0, 66.1, 65.9, 66.0))
"""Even with its BF16, where the kernels alone make FP8 faster."""
AS_FAST = rounds(
    profiled("bf16_compiled", 65.8, host_wait_pct=95.1, gemm_16bit=36.2, attention=7.1, pointwise=16.2),
    *ITS_BF16.rounds_ms,
)
"""Even with it by the kernels alone too."""


def beside_it(as_is: Arm, bf16: Arm = ITS_BF16, host: HostLoad = SLOW, **fields: Any) -> Facts:
    facts = timed(DECODER_468M, as_is, bf16)
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, host=host, **fields))


def test_a_timing_too_noisy_to_tell_names_the_host_that_disturbed_it() -> None:
    report = diagnose(beside_it(FLUX_LIKE))
    assert report.verdict.status == "too_noisy"
    assert not waits_for_the_host(FLUX_LIKE)
    (_finding,) = (each for each in report.findings if each.code == "STP009")
    assert not [step for step in report.prescription if step.code == "STP009"]


def test_a_sign_that_the_idle_time_turns_is_doubted_on_a_disturbed_host() -> None:
    report = diagnose(beside_it(STEADY))
    assert report.verdict.status == "fp8_even"
    assert "STP009" in {each.code for each in report.findings}


def slower(*rounds_ms: float) -> Arm:
    """The same kernels, 1.10x of the BF16 beside them, in steps that wait for the host."""
    found = profiled(
        "as_is", 70.0, host_wait_pct=96.5, gemm_fp8=19.7, cast=15.9, attention=7.0, pointwise=17.1
    )
    return rounds(found, *rounds_ms)


LONG_BF16 = rounds(ITS_BF16, *[65.8] * 16)


def test_a_sign_that_wavers_with_the_host_is_not_told() -> None:
    """A quarter of the rounds is ahead of BF16, as all may be on a quiet host."""
    report = diagnose(beside_it(slower(*[70.0, 71.0, 72.0] * 4, *[60.0] * 4), LONG_BF16))
    assert report.verdict.speedup_high is not None
    assert report.verdict.speedup_high < 1, "the interval alone would tell"
    assert report.verdict.status == "too_noisy"
    assert "STP009" in {each.code for each in report.findings}


@pytest.mark.parametrize(
    "facts",
    [
        beside_it(slower(*[70.0, 71.0, 72.0] * 4, *[60.0] * 3, 70.0), LONG_BF16),
        beside_it(slower(*[70.0, 71.0, 72.0] * 4, *[60.0] * 4), LONG_BF16, load()),
        beside_it(replaced(slower(*[70.0, 71.0, 72.0] * 4, *[60.0] * 4), host_wait_pct=20.0), LONG_BF16),
    ],
    ids=["fewer rounds", "a quiet host", "the gaps have another cause"],
)
def test_a_sign_that_does_not_is_told(facts: Facts) -> None:
    assert diagnose(facts).verdict.status == "fp8_slower"


UNEXPLAINED = rounds(
    profiled("as_is", 68.5, host_wait_pct=96.5, gemm_fp8=19.7, cast=15.9, attention=9.0, pointwise=17.4),
    *[68.5, 68.6, 68.4] * 4,
    *[65.8] * 4,
)
"""Slower than its BF16 in most rounds, and even with it by the kernels alone; its casts are paid for."""


@pytest.mark.slow
def test_nothing_else_calls_it_slower_where_a_disturbed_host_turns_the_answer() -> None:
    slower = diagnose(beside_it(UNEXPLAINED, LONG_BF16, load()))
    assert slower.verdict.status == "fp8_slower"
    assert "STP006" in {each.code for each in slower.findings}
    turned = diagnose(beside_it(UNEXPLAINED, LONG_BF16))
    assert turned.verdict.status == "too_noisy"
    assert "STP006" not in {each.code for each in turned.findings}


def test_a_host_that_was_looked_at_less_costs_no_verdict() -> None:
    """As in a report of an older version."""
    host = HostLoad(window_s=12.0, cores=16, others_pct=94.0, steal_pct=0.0)
    assert diagnose(beside_it(UNEXPLAINED, LONG_BF16, host)).verdict.status == "fp8_slower"


def small(as_is_ms: float, rounds_ms: float) -> Facts:
    """A model whose host sets the pace, at 1.8 times its best: FP8 has the faster kernels and more launches,
    BF16 takes 10 ms. Eight rounds of FP8 in thirty take another time."""
    fp8, bf16 = (
        profiled(name, ms, host_wait_pct=95.0, pointwise=busy_ms)
        for name, ms, busy_ms in (("as_is", as_is_ms, 5.0), ("bf16_compiled", 10.0, 7.0))
    )
    return beside_it(rounds(fp8, *[as_is_ms] * 22, *[rounds_ms] * 8), rounds(bf16, *[10.0] * 30))


@pytest.mark.parametrize(
    ("as_is_ms", "status"),
    [(20.0, "fp8_slower"), (12.5, "too_noisy")],
    ids=["slower at the best pace of the host too", "even at the best pace of the host"],
)
def test_a_host_turns_no_more_than_it_was_slow(as_is_ms: float, status: str) -> None:
    assert diagnose(small(as_is_ms, 9.9)).verdict.status == status


def test_a_host_that_others_use_may_turn_it_down_to_the_kernels() -> None:
    facts = small(20.0, 9.0)
    trial = msgspec.structs.replace(facts.trial, host=load(others_pct=94.0))
    assert diagnose(msgspec.structs.replace(facts, trial=trial)).verdict.status == "too_noisy"


def test_a_quiet_host_makes_no_step_longer() -> None:
    """The profiled kernels of FP8 took 1.07 of its step, as profiling makes them."""
    fp8 = rounds(
        replaced(profiled("as_is", 60.0, gemm_fp8=60.0), busy_ms=64.2, scale=1.07),
        *[60.0, 60.1, 59.9] * 4,
        *[66.5] * 4,
    )
    bf16 = rounds(profiled("bf16_compiled", 65.8, host_wait_pct=95.1, gemm_16bit=62.5), *[65.8] * 16)
    assert diagnose(beside_it(fp8, bf16)).verdict.status == "fp8_faster"


SLOWER = rounds(
    profiled("as_is", 240.0, host_wait_pct=90.0, gemm_fp8=20.0, cast=200.0, attention=7.0, pointwise=12.0),
    *(240.0, 241.0, 239.0, 240.0, 240.0),
)


def mended(pointwise_ms: float) -> Arm:
    """FP8 with all fixes, slower than its BF16; the GPU is idle for what the kernels leave of 79 ms."""
    parts = {"gemm_fp8": 20.0, "attention": 7.0, "pointwise": pointwise_ms}
    found = rounds(profiled("prescribed", 79.0, host_wait_pct=95.0, **parts), 79.0, 80.0, 78.0, 79.0, 79.0)
    return msgspec.structs.replace(found, treatments=("compile-blocks",), base="as_is")


LATE, BUSY_PRESCRIPTION = mended(33.0), mended(51.0)
"""Even with its BF16 by the kernels alone, as an 8B Llama on an H100 whose host was slow; and slower."""


@pytest.mark.slow
def test_advice_that_the_idle_time_of_the_prescription_turns_is_doubted() -> None:
    facts = beside_it(SLOWER, AS_FAST)
    trial = msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms, LATE))
    report = diagnose(msgspec.structs.replace(facts, trial=trial))
    assert report.verdict.status == "fp8_slower"
    (_finding,) = (each for each in report.findings if each.code == "STP009")
    assert certainty(report).startswith("Yes: ")
    wavering = rounds(LATE, 79.0, 80.0, 60.0, 79.0, 59.0)
    told = msgspec.structs.replace(trial, arms=(*facts.trial.arms, wavering))
    doubted = diagnose(msgspec.structs.replace(facts, trial=told))
    assert doubted.verdict.achievable_speedup is None
    calm = msgspec.structs.replace(trial, arms=(*facts.trial.arms, BUSY_PRESCRIPTION))
    report = diagnose(msgspec.structs.replace(facts, trial=calm))
    assert "STP009" not in {each.code for each in report.findings}


def test_a_conversion_whose_gain_the_idle_time_turns_is_doubted() -> None:
    arms: dict[str, Any] = {"as_is": (65.8,) * 5, "float8_tensorwise": (70.0,) * 5}
    facts = Of(arms).facts(without_fp8())
    parts = {"as_is": AS_FAST.breakdown, "float8_tensorwise": LATE.breakdown}
    timed = tuple(msgspec.structs.replace(each, breakdown=parts[each.name]) for each in facts.trial.arms)
    trial = msgspec.structs.replace(facts.trial, arms=timed, host=SLOW)
    report = diagnose(msgspec.structs.replace(facts, trial=trial))
    assert "STP009" in {each.code for each in report.findings}


NEVER_WAITS = profiled("as_is", 66.0, gemm_fp8=20.0, cast=16.0, attention=7.0, pointwise=21.5)
LATE_BF16 = rounds(
    profiled("bf16_compiled", 69.5, host_wait_pct=95.1, gemm_16bit=40.0, attention=7.0, pointwise=17.5),
    *(69.7, 69.5, 69.4, 69.6, 69.5),
)
"""Slower than it by as long as the GPU waits; even with it by the kernels alone."""


def test_where_bf16_waits_it_is_not_said_that_fp8_loses_the_most() -> None:
    report = diagnose(beside_it(rounds(NEVER_WAITS, *STEADY.rounds_ms), LATE_BF16))
    assert report.verdict.status == "fp8_faster"
    (_finding,) = (each for each in report.findings if each.code == "STP009")


BUSY_GPU = rounds(
    profiled("as_is", 67.4, host_wait_pct=96.5, gemm_fp8=19.7, cast=25.9, attention=7.0, pointwise=13.1),
    *FLUX_LIKE.rounds_ms,
)


@pytest.mark.parametrize(
    "facts",
    [
        beside_it(STEADY, AS_FAST),
        beside_it(FLUX_LIKE, rounds(ITS_BF16, 90.0, 91.0, 90.0, 89.0, 90.0)),
        beside_it(FLUX_LIKE, host=load()),
        beside_it(FLUX_LIKE, host=NOT_RECORDED),  # type: ignore[arg-type]
        beside_it(FLUX_LIKE, device="cpu"),
        beside_it(replaced(FLUX_LIKE, host_wait_pct=20.0)),
        beside_it(replaced(FLUX_LIKE, host_wait_pct=None)),
        beside_it(replaced(FLUX_LIKE, reliable=False)),
        beside_it(BUSY_GPU),
        beside_it(STEADY, rounds(replaced(AS_FAST, idle_ms=0.5), 66.3, 61.6, 73.7, 65.8, 69.8)),
    ],
    ids=[
        "it is told",
        "it is told from afar",
        "a quiet host",
        "nobody looked at the host",
        "on a CPU",
        "the gaps have another cause",
        "no gap was seen",
        "a profile that cannot be relied on",
        "idle for no more than what is even",
        "the noisier step keeps the GPU busy",
    ],
)
def test_no_host_is_named_that_hides_nothing(facts: Facts) -> None:
    report = diagnose(facts)
    assert "STP009" not in {each.code for each in report.findings}
    assert "busy" not in report.verdict.summary + certainty(report)


def test_a_conversion_that_is_too_noisy_to_tell_names_the_host_too() -> None:
    arms: dict[str, Any] = {"as_is": (65.8,) * 5, "float8_tensorwise": FLUX_LIKE.rounds_ms}
    facts = Of(arms).facts(without_fp8())
    converted = next(each for each in facts.trial.arms if each.name == "float8_tensorwise")
    arm = msgspec.structs.replace(converted, breakdown=FLUX_LIKE.breakdown)
    as_is = msgspec.structs.replace(facts.trial.arms[0], breakdown=None)
    trial = msgspec.structs.replace(facts.trial, arms=(as_is, arm), host=SLOW)
    facts = msgspec.structs.replace(facts, trial=trial)
    report = diagnose(facts)
    assert report.verdict.status == "no_fp8"
    assert "STP009" in {each.code for each in report.findings}


def test_a_host_that_sets_the_pace_is_named_once() -> None:
    noisy = rounds(WAITING, 30.0, 41.5, 45.0, 50.0, 41.0)
    facts = beside_it(noisy, rounds(ITS_BF16, 40.0, 41.0, 42.0, 43.0, 41.5))
    assert host_doubt(facts.trial)
    assert trial_view(facts).host_contention is None
    assert "while it limited the step" in next(
        each.title for each in diagnose(facts).findings if each.code == "STP009"
    )
