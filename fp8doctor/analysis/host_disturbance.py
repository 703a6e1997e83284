"""What of the host makes the time of a step doubtful that waits for it: load, steal, a used-up quota."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.arms import best_fp8, fair_bf16, ratio, uses_fp8
from fp8doctor.analysis.median_interval import interval
from fp8doctor.analysis.outcome import EVEN, is_noise, measured_speed
from fp8doctor.analysis.step_difference import HOST_WAIT_PCT, breakdown_of, waits_for_the_host
from fp8doctor.facts import Arm, Facts, HostLoad, Trial, recorded
from fp8doctor.facts.arm_names import BASELINES, ArmName

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


def moved_by_it(facts: Facts) -> Arm | None:
    """Find the step that the host can have moved to the other side of BF16, or so much that the timing does
    not tell: the GPU is idle for longer than what is called even, in gaps that end with a late launch.

    It need not set the pace of the whole step, which `waiting_for_it` asks.
    """
    if facts.trial.device == "cpu":
        return None
    moved = (_noisier_or_idle_for_longer(fp8, bf16, facts.trial) for fp8, bf16 in _compared(facts))
    return next((each for each in moved if each and _waits_now_and_then(each)), None)


def _noisier_or_idle_for_longer(fp8: Arm, bf16: Arm, trial: Trial) -> Arm | None:
    if is_noise(ratio(bf16, fp8), trial):
        return max(fp8, bf16, key=_spread)
    return _idle_for_longer(fp8, bf16)


def _waits_now_and_then(step: Arm) -> bool:
    found = breakdown_of(step)
    if found is None or not step.step_ms or found.host_wait_pct is None:
        return False
    return found.idle_ms > EVEN * step.step_ms and found.host_wait_pct >= HOST_WAIT_PCT


def _compared(facts: Facts) -> Iterator[tuple[Arm, Arm]]:
    """Name the steps that an answer holds to each other, each FP8 with its BF16: FP8 as it is, then the
    fastest form of it, which is the fastest conversion of a model without FP8."""
    if not recorded(facts, "network"):
        return
    measured = measured_speed(facts)
    if measured is not None:
        yield measured.as_is, measured.bf16
    elif uses_fp8(facts):
        return
    fp8 = best_fp8(facts)
    bf16 = fair_bf16(facts, fp8) if fp8 else None
    if fp8 is not None and bf16 is not None and fp8.name != ArmName.AS_IS:
        yield fp8, bf16


def _idle_for_longer(fp8: Arm, bf16: Arm) -> Arm | None:
    """Choose the step that is idle for longer, where the kernels alone say of FP8 that it is faster, even or
    slower, and the steps say another of the three and are further from them than what is even."""
    parts = [breakdown_of(each) for each in (fp8, bf16) if recorded(each, "breakdown")]
    in_fp8, in_bf16 = parts if len(parts) == 2 else (None, None)
    if in_fp8 is None or in_bf16 is None or not in_fp8.busy_ms:
        return None
    timed, alone = ratio(bf16, fp8).median, in_bf16.busy_ms / in_fp8.busy_ms
    if _side(timed) == _side(alone) or abs(timed - alone) < EVEN:
        return None
    return fp8 if in_fp8.idle_ms > in_bf16.idle_ms else bf16


def _side(speedup: float) -> int:
    """Tell faster from even and slower."""
    return 0 if abs(speedup - 1) < EVEN else 1 if speedup > 1 else -1


def _spread(timed: Arm) -> float:
    known = interval(timed.rounds_ms)
    return (known.high - known.low) / known.median


def hangs_on(facts: Facts) -> str | None:
    """Tell what of the host the answer hangs on (`moved_by_it`); None where nothing disturbed it, and where
    the times are doubtful for it anyway."""
    if not recorded(facts, "trial.host") or doubt(facts.trial) or moved_by_it(facts) is None:
        return None
    return disturbance(facts.trial.host)
