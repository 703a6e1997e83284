"""Noise: can these times be trusted, and if not, why?

Three things make the times of a trial unreliable: a step differs from its own copy, the GPU was slowed down
or shared, or the host was busy while a step waited for it. A busy host can also decide the answer of a trial
whose times are reliable, if a compared step waits for the host in some rounds only.
"""

from __future__ import annotations

import math

from fp8doctor.analysis.arms import ratio
from fp8doctor.analysis.significance import EVEN, Interval, interval, side
from fp8doctor.analysis.step_difference import HOST_WAIT_PCT, breakdown_of, waits_for_the_host
from fp8doctor.facts import Arm, Health, HostLoad, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES
from fp8doctor.facts.trial import GREW, GREW_ONCE

SELF_CHECK_TOLERANCE = 0.02
"""BF16 against its own replica must come out at 1.00 within this, or the trial is called unreliable."""

CORES_PCT = 50.0
"""Use of the cores by others, in per cent, that counts: a core has two hardware threads, and beyond half of
them every further one shares its core with another."""

TAKEN_PCT = 100 * EVEN
"""Share of the time, in per cent, that counts if it is taken from this process itself, or from the GPU: the
same as what this tool calls even."""

PYTHON_SLOWED = 1.5
"""Median / fastest time of a fixed piece of Python that counts. A hardware thread that shares its core has
0.6 to 0.7 of it; clocks alone move by less. A convention of this tool."""

TURNED_ROUNDS = 0.25
"""Share of the rounds that give the answer of a quiet host, from which the timing does not tell. For a
Flux-like model, 1.04x by plain scripts, 13 of 30 did, and the median was 0.96 (H100). A convention of this
tool."""

SLOWDOWNS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Reasons that mean heat or a failing supply of power. Source: NVML API reference, nvmlClocksEventReasons.
Reaching the default power limit, a voltage limit or clocks that the owner set are the ordinary state of a GPU
at work."""

SLOWDOWN_PCT = 10.0
"""Share of the samples, in per cent, from which a slowdown counts. A convention of this tool: NVML reports
one while clocks change, and a median over rounds tolerates a few."""


APART, APART_HOST_BOUND = 0.015, 0.10
"""What two processes differ by beyond their rounds, as a share of the step: half of an interval of 90%
confidence, the second if the trial's step waits for the host. With them nine of ten plain scripts lie in the
interval on an H100 and on an H200: of 142 steps of 35 trials 136 do, and 96 without
(`tests/analysis/test_script_interval.py`). The second is the least for 67 steps that wait for the host, 13 of
them of four jobs that nothing here was fitted on: 0.07 held 59 of 67, and 8 of the 13."""


def why_unreliable(trial: Trial) -> str | None:
    """Explain why the times of a trial cannot be trusted; None if they can."""
    alike = self_check_ratio(trial)
    found = (
        f"the step timed against its own copy gives {alike:.3f} instead of 1.00"
        if alike and copies_differ(trial)
        else None,
        gpu_contention(trial.health),
        host_doubt(trial),
    )
    return "; ".join(filter(None, found)) or None


def self_check_ratio(trial: Trial) -> float | None:
    """Return the time of a step divided by that of its own copy, if both were timed."""
    return trial.self_check_ratio if recorded(trial, "self_check_ratio") else None


def copies_differ(trial: Trial) -> bool:
    """Return whether a step and its own copy differ by more than the tolerance."""
    alike = self_check_ratio(trial)
    return bool(alike) and abs((alike or 1.0) - 1) > SELF_CHECK_TOLERANCE


def script_interval(step: Arm, trial: Trial) -> Interval | None:
    """Compute where the same step lies in a script of its own, with the confidence of `Interval`.

    The interval of the rounds tells how one process varies. What two differ by is added as independent errors
    are. None of a step with a single round; a CPU's has the rounds' own.
    """
    ms, low, high = (step.get(name) for name in ("step_ms", "low_ms", "high_ms"))
    if not ms or not low or not high:
        return None
    of_host = if_recorded(host_bound_step, trial) is not None
    apart = ms * (0.0 if trial.get("device") == "cpu" else APART_HOST_BOUND if of_host else APART)
    return Interval(ms, ms - math.hypot(ms - low, apart), ms + math.hypot(high - ms, apart))


def is_noise(bf16: Arm | None, fp8: Arm | None, trial: Trial) -> bool:
    """Return whether two steps were timed and the timing does not decide between them.

    The interval of their ratio swallows the effect, or a busy host turned the answer, or the step and its own
    copy differ as much as the two.
    """
    if bf16 is None or fp8 is None:
        return False
    speedup, alike = ratio(bf16, fp8), self_check_ratio(trial)
    if swallows_effect(speedup) or turned_by_host(bf16, fp8, trial):
        return True
    differ = alike and copies_differ(trial)
    return bool(alike and differ and abs(math.log(alike)) >= abs(math.log(speedup.median)))


def swallows_effect(speedup: Interval) -> bool:
    """Return whether the interval holds 1, but its median or both ends are not even."""
    apart = abs(speedup.median - 1) >= EVEN
    return speedup.low <= 1 <= speedup.high and (
        apart or (speedup.low < 1 - EVEN and speedup.high > 1 + EVEN)
    )


def gpu_contention(health: Health | None) -> str | None:
    """Describe what slowed some rounds on the GPU; None if NVML saw nothing."""
    if health is None:
        return None
    said = [f"{reason} in {share:.0f}% of the samples" for reason, share in slowdowns(health).items()]
    others_pct = health.get("other_use_pct")
    if others_pct is not None and others_pct >= TAKEN_PCT:
        said.append(f"other processes used up to {others_pct:.0f}% of the GPU")
    return ", ".join(said) or None


def slowdowns(health: Health) -> dict[str, float]:
    """List the slowdowns that count, with their share of the samples in per cent."""
    throttled = health.get("throttled_pct", {})
    return {
        reason: share for reason, share in throttled.items() if reason in SLOWDOWNS and share >= SLOWDOWN_PCT
    }


def host_contention(load: HostLoad) -> str | None:
    """Describe what disturbed the host while variants were timed; None if nothing did."""
    said = []
    if load.get("others_pct", 0.0) >= CORES_PCT:  # of older reports
        said.append(f"others used {load.others_pct:.0f}% of the host's {load.cores} cores")
    if _python_slowed(load) >= PYTHON_SLOWED:
        said.append(f"Python ran {_python_slowed(load):.1f} times as long as at its best")
    return ", ".join(said) or None


def host_bound_step(trial: Trial) -> Arm | None:
    """Find the step, as it is or in BF16, that waits for the host on a GPU."""
    both = (each for each in trial.arms if each.name in BASELINES and each.tried)
    return None if trial.device == "cpu" else next(filter(waits_for_the_host, both), None)


def host_doubt(trial: Trial) -> str | None:
    """Explain how a busy host makes the times doubtful; None if it does not."""
    waiting = host_bound_step(trial) if recorded(trial, "host") else None
    what = host_contention(trial.host) if waiting else None
    return f"the step waits for the host, and {what}" if what else None


def disturbing_host(bf16: Arm, fp8: Arm, trial: Trial) -> str | None:
    """Describe the busy host that may hide the difference of two steps; None if it does not.

    Also None if all times are doubtful because of it.
    """
    what = host_contention(trial.host) if trial.device != "cpu" and recorded(trial, "host") else None
    noisier = max(bf16, fp8, key=lambda each: interval(each.rounds_ms).spread)
    waits = _waits_at_times(noisier)
    return what if what and waits and is_noise(bf16, fp8, trial) and not host_doubt(trial) else None


def turned_by_host(bf16: Arm, fp8: Arm, trial: Trial) -> bool:
    """Return whether rounds waver between a busy host's answer and a quiet one's.

    The answers are: FP8 is faster, even or slower. A host that keeps every round waiting alike is that of the
    job too. False if the host was not recorded.
    """
    if trial.device == "cpu" or not recorded(trial, "host"):
        return False
    timed, quiet = ratio(bf16, fp8).median, if_recorded(_quiet_ratio, bf16, fp8, trial.host)
    if quiet is None or side(timed) == side(quiet) or abs(timed - quiet) < EVEN:
        return False
    further = 1 if quiet > timed else -1
    late = fp8 if quiet > timed else bf16
    quieter = [
        further * side(a / b) >= further * side(quiet)
        for a, b in zip(bf16.rounds_ms, fp8.rounds_ms, strict=False)
    ]
    return _waits_at_times(late) and sum(quieter) >= TURNED_ROUNDS * len(quieter)


def _quiet_ratio(bf16: Arm, fp8: Arm, load: HostLoad) -> float | None:
    """Estimate the ratio of two steps on a quiet host; None if it was quiet, or if it is unknown."""
    if host_contention(load) is None:
        return None
    in_bf16, in_fp8 = _quiet_ms(bf16, load), _quiet_ms(fp8, load)
    return in_bf16 / in_fp8 if in_bf16 and in_fp8 else None


def _quiet_ms(step: Arm, load: HostLoad) -> float | None:
    """Estimate the step's least time on a quiet host, in ms; None if not profiled.

    That is the time of its kernels, and if it is known how much slower Python ran, no less than the step at
    the best pace.
    """
    found = breakdown_of(step) if recorded(step, "breakdown") else None
    if found is None or not step.step_ms:
        return None
    slowed = _python_slowed(load)
    least_ms = max(found.busy_ms, step.step_ms / (slowed if slowed >= PYTHON_SLOWED else math.inf))
    return min(step.step_ms, least_ms)  # profiled kernels may take longer than the step


def _python_slowed(load: HostLoad) -> float:
    """Divide the median of the fixed piece of Python by its best."""
    return load.pace_median_ms / load.pace_low_ms


def _waits_at_times(step: Arm) -> bool:
    """Return whether the GPU idles for more than an even speedup at late launches.

    The host need not set the pace of the whole step, as in `host_bound_step`.
    """
    found = breakdown_of(step) if recorded(step, "breakdown") else None
    if found is None or not step.step_ms or found.host_wait_pct is None:
        return False
    return found.idle_ms > EVEN * step.step_ms and found.host_wait_pct >= HOST_WAIT_PCT


def stated_doubt(trial: Trial) -> str:
    """Write why the times are unreliable, without what does not disturb timing; else empty."""
    parts = (trial.reason or "").split("; ") if trial.get("reliable") is False else []
    return "; ".join(each for each in parts if not each.startswith((GREW, *GREW_ONCE)))
