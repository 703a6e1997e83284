"""How sure the times of a trial are: a speedup with its interval, and what disturbed the timing."""

import math
from collections.abc import Iterable

from fp8doctor.analysis.arms import ratio, round_ratios
from fp8doctor.analysis.significance import EVEN, Number
from fp8doctor.analysis.step_difference import HOST_BOUND_PCT, waits_for_the_host
from fp8doctor.facts import Arm, Health, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES

SELF_CHECK_TOLERANCE = 0.02
"""BF16 against its own replica must come out at 1.00 within this, or the trial is called unreliable."""

TAKEN_PCT = 100 * EVEN
"""Share of the time, in per cent, that counts if it is taken from this process itself, or from the GPU: the
same as what this tool calls even."""

PYTHON_SLOWED = 1.5
"""Median / fastest time of a fixed piece of Python that counts. A hardware thread that shares its core has
0.6 to 0.7 of it; clocks alone move by less. A convention of this tool."""

TURNED_ROUNDS = 0.25
"""Share of the rounds at either end that a busy host may have turned. For a Flux-like model, 1.04x by plain
scripts, 13 of 30 rounds had that answer, and the median was 0.96 (H100). A convention of this tool."""

APART, APART_HOST_BOUND = 0.015, 0.10
"""What two processes differ by beyond their rounds, as a share of the step: half of an interval of 90%
confidence, the second if the trial's step waits for the host. With them nine of ten plain scripts lie in the
interval on an H100 and on an H200: of 143 steps of 36 trials 138 do, and 97 without
(`research/benchmarks/test_script_interval.py`). The second holds 52 of the 54 that wait for the host. No job
outside of these trials shows that it is enough."""


def speed(of: Arm, against: Arm, trial: Trial) -> Number:
    """Divide the times of two variants, ``against`` / ``of``, with what noise leaves open.

    If one of them waits for a busy host, all but the outer rounds may be right. What a step and its own copy
    differ by, any two may.
    """
    found = ratio(against, of)
    if busy_host(trial, (of, against), 100 * EVEN):
        rounds = sorted(round_ratios(against, of))
        cut = math.ceil(TURNED_ROUNDS * len(rounds)) - 1
        ends = (found.low, found.high, rounds[cut], rounds[-1 - cut])
        found = Number(found.value, min(ends), max(ends))
    alike = _unlike_its_copy(trial) or 1.0
    apart = max(alike, 1 / alike)
    return Number(found.value, found.low / apart, found.high * apart)


def script_interval(step: Arm, trial: Trial) -> Number | None:
    """Compute where the same step lies in a script of its own, with the confidence of `CONFIDENCE`.

    The interval of the rounds tells how one process varies. What two differ by is added as independent errors
    are. None of a step with a single round; a CPU's has the rounds' own.
    """
    ms, low, high = (step.get(name) for name in ("step_ms", "low_ms", "high_ms"))
    if not ms or not low or not high:
        return None
    of_host = any(if_recorded(waits_for_the_host, each) for each in _baselines(trial))
    apart = ms * (0.0 if trial.get("device") == "cpu" else APART_HOST_BOUND if of_host else APART)
    return Number(ms, ms - math.hypot(ms - low, apart), ms + math.hypot(high - ms, apart))


BUSY_HOST = "the host was busy"


def disturbances(trial: Trial) -> dict[str, str]:
    """Map what makes the times of a trial doubtful, in a few words, to the same with its size."""
    alike, gpu, host = _unlike_its_copy(trial), gpu_contention(trial.get("health")), busy_host(trial)
    found = {
        BUSY_HOST: host and f"the step waits for the host, and {host}",
        "two copies of one step differ": alike
        and f"the step timed against its own copy gives {alike:.3f} instead of 1.00",
        "the GPU was slowed or shared": gpu,
    }
    return {words: size for words, size in found.items() if size}


def _unlike_its_copy(trial: Trial) -> float:
    """Return the time of a step / that of its own copy if both were timed and differ too much; else 0."""
    alike = trial.get("self_check_ratio") or 0.0
    return alike if alike and abs(alike - 1) > SELF_CHECK_TOLERANCE else 0.0


def busy_host(trial: Trial, steps: Iterable[Arm] = (), idle_pct: float = HOST_BOUND_PCT) -> str:
    """Describe what disturbed the host while one of these steps waited for it; empty if nothing did.

    By default the step as it is and BF16.
    """
    known = recorded(trial, "host.pace_median_ms") and recorded(trial, "host.pace_low_ms")
    if trial.get("device") == "cpu" or not known:
        return ""
    slowed = trial.host.pace_median_ms / trial.host.pace_low_ms
    waits = (if_recorded(waits_for_the_host, each, idle_pct) for each in steps or _baselines(trial))
    if slowed < PYTHON_SLOWED or not any(waits):
        return ""
    return f"Python ran {slowed:.1f} times as long as at its best"


def _baselines(trial: Trial) -> list[Arm]:
    on_cpu = trial.get("device") == "cpu"
    arms = () if on_cpu else trial.get("arms", ())
    return [each for each in arms if each.get("name") in BASELINES and each.get("tried")]


def gpu_contention(health: Health | None) -> str:
    """Describe what slowed some rounds on the GPU; empty if NVML saw nothing."""
    others_pct = health.get("other_use_pct") if health is not None else None
    if others_pct is None or others_pct < TAKEN_PCT:
        return ""
    return f"other processes used up to {others_pct:.0f}% of the GPU"
