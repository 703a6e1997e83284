"""What of the host makes the time of a step doubtful that waits for it: load, steal, a used-up quota."""

from __future__ import annotations

import math

from fp8doctor.analysis.arms import ratio, share_rounds
from fp8doctor.analysis.significance import EVEN, side
from fp8doctor.analysis.step_difference import HOST_WAIT_PCT, breakdown_of, waits_for_the_host
from fp8doctor.facts import Arm, HostLoad, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES

OTHERS_PCT = 50.0
"""Use of the cores by others, in per cent, that counts: a core has two hardware threads, and beyond half of
them every further one shares its core with another."""

TAKEN_PCT = 100 * EVEN
"""Share of the time, in per cent, that counts where it is taken from this process itself: what this tool
calls even."""

SLOWED = 1.5
"""Median / fastest time of a fixed piece of Python that counts. A hardware thread that shares its core has
0.6 to 0.7 of it; clocks alone move by less. A convention of this tool."""

WAVERING = 0.25
"""Share of the rounds that say what a quiet host would, from which the timing tells nothing. Of a Flux-like
model, 1.04x by plain scripts, 13 of 30 did, and the median said 0.96 (H100). A convention of this tool."""


def disturbance(load: HostLoad) -> str | None:
    """Tell what disturbed the host while arms were timed; None when nothing did."""
    said = []
    if load.others_pct >= OTHERS_PCT:
        said.append(f"others used {load.others_pct:.0f} % of the host's {load.cores} cores")
    if load.steal_pct >= TAKEN_PCT:
        said.append(f"the hypervisor took {load.steal_pct:.0f} % of them")
    if load.throttled_pct is not None and load.throttled_pct >= TAKEN_PCT:
        said.append(f"the quota of the container was used up in {load.throttled_pct:.0f} % of its periods")
    if load.waited_pct is not None and load.waited_pct >= TAKEN_PCT:
        said.append(f"a thread of the step waited for a core {load.waited_pct:.0f} % of the time")
    if load.pace_median_ms >= SLOWED * load.pace_low_ms:
        said.append(f"Python ran {_slowed(load):.1f} times as long as at its best")
    return ", ".join(said) or None


def waiting_for_it(trial: Trial) -> Arm | None:
    """Find the step, as it is or in BF16, that waits for the host on a GPU."""
    both = (each for each in trial.arms if each.name in BASELINES and each.tried)
    return None if trial.device == "cpu" else next(filter(waits_for_the_host, both), None)


def doubt(trial: Trial) -> str | None:
    """Tell what of the host makes the times doubtful; None where the GPU sets their pace, or nothing did."""
    waiting = waiting_for_it(trial) if recorded(trial, "host") else None
    what = disturbance(trial.host) if waiting else None
    return f"the step waits for the host, and {what}" if what else None


def turned_by_host(bf16: Arm, fp8: Arm, trial: Trial) -> bool:
    """Whether the rounds waver between what a disturbed host and what a quiet one would have them say: FP8 is
    faster, even or slower.

    A host that keeps every round waiting alike is that of the job too. Not where less of the host was looked
    at.
    """
    late = if_recorded(late_on_the_other_side, bf16, fp8, trial)
    if late is None or not share_rounds(bf16, fp8):
        return False
    timed, quiet = ratio(bf16, fp8).median, _quiet_ratio(bf16, fp8, trial.host)
    assert quiet is not None
    further = 1 if quiet > timed else -1
    quieter = [
        further * side(a / b) >= further * side(quiet)
        for a, b in zip(bf16.rounds_ms, fp8.rounds_ms, strict=True)
    ]
    return sum(quieter) >= WAVERING * len(quieter)


def late_on_the_other_side(bf16: Arm, fp8: Arm, trial: Trial) -> Arm | None:
    """Find the step whose wait for a disturbed host has the pair on another side than a quiet one would; None
    where that is no further than what is called even."""
    if trial.device == "cpu" or not recorded(trial, "host") or disturbance(trial.host) is None:
        return None
    timed, quiet = ratio(bf16, fp8).median, _quiet_ratio(bf16, fp8, trial.host)
    if quiet is None or side(timed) == side(quiet) or abs(timed - quiet) < EVEN:
        return None
    late = fp8 if quiet > timed else bf16
    return late if waits_now_and_then(late) else None


def _quiet_ratio(bf16: Arm, fp8: Arm, load: HostLoad) -> float | None:
    in_bf16, in_fp8 = _quiet_ms(bf16, load), _quiet_ms(fp8, load)
    return in_bf16 / in_fp8 if in_bf16 and in_fp8 else None


def _quiet_ms(step: Arm, load: HostLoad) -> float | None:
    """Estimate the least that the step takes on a quiet host, in ms: its kernels, and where it is known how
    much slower Python ran, no less than the step at that pace. None where it was not profiled."""
    found = breakdown_of(step) if recorded(step, "breakdown") else None
    if found is None or not step.step_ms:
        return None
    slowed = _slowed(load)
    least_ms = max(found.busy_ms, step.step_ms / (slowed if slowed >= SLOWED else math.inf))
    return min(step.step_ms, least_ms)  # profiled kernels may take longer than the step


def _slowed(load: HostLoad) -> float:
    """Divide the median of the fixed piece of Python by its best."""
    return load.pace_median_ms / load.pace_low_ms


def waits_now_and_then(step: Arm) -> bool:
    """Whether the GPU is idle for longer than what is called even, in gaps that end with a late launch.

    The host need not set the pace of the whole step, which `waiting_for_it` asks.
    """
    found = breakdown_of(step) if recorded(step, "breakdown") else None
    if found is None or not step.step_ms or found.host_wait_pct is None:
        return False
    return found.idle_ms > EVEN * step.step_ms and found.host_wait_pct >= HOST_WAIT_PCT
