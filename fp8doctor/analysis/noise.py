"""How sure the times of a trial are: a speedup with its interval, and what disturbed the timing."""

from __future__ import annotations

import math

from fp8doctor.analysis.arms import ratio, round_ratios
from fp8doctor.analysis.significance import EVEN, Interval, Number
from fp8doctor.analysis.step_difference import waits_for_the_host
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
"""Share of the rounds at either end that a busy host may have turned. For a Flux-like model, 1.04x by plain
scripts, 13 of 30 rounds had that answer, and the median was 0.96 (H100). A convention of this tool."""

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
interval on an H100 and on an H200: of 143 steps of 36 trials 138 do, and 97 without
(`research/benchmarks/test_script_interval.py`). The second holds 52 of the 54 that wait for the host. No job
outside of these trials shows that it is enough."""


def speed(of: Arm, against: Arm, trial: Trial) -> Number:
    """Divide the times of two variants, ``against`` / ``of``, with what noise leaves open.

    If one of them waits for a busy host, all but the outer rounds may be right. If a step and its own copy
    differ as much as the two, none may be.
    """
    found = ratio(against, of)
    if busy_host(trial, of, against):
        rounds = sorted(round_ratios(against, of))
        cut = math.ceil(TURNED_ROUNDS * len(rounds)) - 1
        ends = (rounds[cut], rounds[-1 - cut])
        found = Number(found.value, min(found.low, *ends), max(found.high, *ends))
    alike = self_check_ratio(trial)
    if alike and copies_differ(trial) and abs(math.log(alike)) >= abs(math.log(found.value)):
        return found.open_to_both()
    return found


def busy_host(trial: Trial, *steps: Arm) -> str:
    """Describe what disturbed the host while one of these steps waited for it at times; else empty."""
    if trial.get("device") == "cpu" or not recorded(trial, "host"):
        return ""
    waits = any(recorded(each, "breakdown") and waits_for_the_host(each, 100 * EVEN) for each in steps)
    return (host_contention(trial.host) or "") if waits else ""


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


def gpu_contention(health: Health | None) -> str | None:
    """Describe what slowed some rounds on the GPU; None if NVML saw nothing."""
    if health is None:
        return None
    throttled = health.get("throttled_pct", {})
    slowdowns = {
        reason: share for reason, share in throttled.items() if reason in SLOWDOWNS and share >= SLOWDOWN_PCT
    }
    said = [f"{reason} in {share:.0f}% of the samples" for reason, share in slowdowns.items()]
    others_pct = health.get("other_use_pct")
    if others_pct is not None and others_pct >= TAKEN_PCT:
        said.append(f"other processes used up to {others_pct:.0f}% of the GPU")
    return ", ".join(said) or None


def host_contention(load: HostLoad) -> str | None:
    """Describe what disturbed the host while variants were timed; None if nothing did."""
    said = []
    if load.get("others_pct", 0.0) >= CORES_PCT:  # of older reports
        said.append(f"others used {load.others_pct:.0f}% of the host's {load.cores} cores")
    if (slowed := load.pace_median_ms / load.pace_low_ms) >= PYTHON_SLOWED:
        said.append(f"Python ran {slowed:.1f} times as long as at its best")
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


def stated_doubt(trial: Trial) -> str:
    """Write why the times are unreliable, without what does not disturb timing; else empty."""
    parts = (trial.reason or "").split("; ") if trial.get("reliable") is False else []
    return "; ".join(each for each in parts if not each.startswith((GREW, *GREW_ONCE)))
