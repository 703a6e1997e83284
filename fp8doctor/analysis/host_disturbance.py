"""What of the host makes the time of a step doubtful that waits for it: load, steal, a used-up quota."""

from __future__ import annotations

from fp8doctor.analysis.outcome import EVEN
from fp8doctor.analysis.step_difference import waits_for_the_host
from fp8doctor.facts import Arm, HostLoad, Trial, recorded
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
        slowed = load.pace_median_ms / load.pace_low_ms
        said.append(f"Python ran {slowed:.1f} times as long as at its best")
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
