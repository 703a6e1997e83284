"""Speed of FP8 compared with BF16: as it is, of each variant, and its bound."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import (
    arm,
    best_bf16,
    fair_bf16,
    fp8_totals,
    left_out_bf16,
    ratio,
    ratio_on_screen,
    timed_a_model,
    uses_fp8,
)
from fp8doctor.analysis.noise import is_noise
from fp8doctor.analysis.significance import EVEN, Interval, is_even
from fp8doctor.analysis.speedup_bound import Ceiling, bound
from fp8doctor.analysis.treatment_table import AS_COPIED, AS_YOU_RUN_IT
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    LEFT_OUT_FOR_TIME,
    ArmName,
    Reason,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.recipes import stack_of


def measured_speedup(facts: Facts) -> Interval | None:
    """Divide the best BF16 by FP8 as it runs; None without FP8, or without both times.

    A compiled BF16 that was left out for time may be faster than the timed one: then FP8 is known to be
    slower if it is slower than that one, and nothing else is known.
    """
    if not timed_a_model(facts) or not uses_fp8(facts):
        return None
    as_is, bf16 = arm(facts.trial, ArmName.AS_IS), best_bf16(facts)
    if as_is is None or bf16 is None:
        return None
    speedup = ratio_on_screen(bf16, as_is)
    return None if left_out_bf16(facts.trial) is not None and speedup.high >= 1 else speedup


def is_faster(facts: Facts) -> bool:
    """Return whether FP8 as it runs was timed as faster than BF16 for sure."""
    speedup = measured_speedup(facts)
    if speedup is None or is_even(speedup) or speedup.median < 1:
        return False
    return not is_noise(best_bf16(facts), arm(facts.trial, ArmName.AS_IS), facts.trial)


def fp8_never_ran(trial: Trial) -> bool:
    """Return whether the step as it is ran without a single FP8 matmul."""
    return any(each.name == ArmName.AS_IS and why_of(each) is Reason.NO_FP8_GEMM for each in trial.arms)


def own_words(facts: Facts) -> str:
    """Choose words for the step as it is: copies of a watched script's step are not how it runs."""
    return AS_COPIED if facts.get("observed.steps_ms") and facts.arms() else AS_YOU_RUN_IT


def watched_job(facts: Facts) -> str:
    """Name the watched job: a script, or a training that a callback watched."""
    return "the training" if facts.get("target.kind") == "live" else "the script"


def never_ran_in_script(facts: Facts) -> bool:
    """Return whether the watched script's profiled step has no FP8 matmul.

    Emulated FP8 has none. A layer that notes itself that it ran in FP8 may have kernels of unknown names.
    """
    if facts.get("observed.fp8_gemms") != 0:
        return False
    fp8 = [
        linear
        for linear in facts.network.linears
        if linear.use == "training" and not linear.get("features", {}).get("emulate")
    ]
    return bool(fp8) and not any(linear.get("engaged") for linear in fp8)


def outside_autocast(facts: Facts) -> bool:
    """Return whether no FP8 autocast is open and all FP8 layers need one.

    They are Transformer Engine's, which compute in BF16 outside of one. Raises `Unrecorded` if the step could
    not be read.
    """
    fp8 = facts.network.fp8
    return (
        all(stack_of(linear).under_autocast and linear.engaged is None for linear in fp8)
        and facts.training.fp8_autocast is False
    )


def fp8_pays(facts: Facts) -> bool:
    """Return whether a GPU timed a whole FP8 step that is not clearly slower."""
    if not recorded(facts, "trial.arms") or facts.trial.device == "cpu":
        return False
    pairs = [(bf16, fp8) for fp8 in fp8_totals(facts) if (bf16 := fair_bf16(facts, fp8))]
    return any(
        is_noise(*pair, facts.trial) or (times := ratio(*pair)).high >= 1 or times.median > 1 - EVEN
        for pair in pairs
    )


def waits_for_time(trial: Trial) -> bool:
    """Return whether a change was not tried because the budget left no time for it."""
    return any(
        not each.tried and each.treatments and why_of(each) in LEFT_OUT_FOR_TIME for each in trial.arms
    )


def ceiling(facts: Facts) -> Ceiling | None:
    """Return the upper bound of FP8 over the best BF16 on this GPU; None if unknown.

    It is never below a speedup that timing proves, whatever the kernels say.
    """
    found = kernel_bound(facts)
    if found is None:
        return None
    totals = ((fair_bf16(facts, each), each) for each in fp8_totals(facts))
    return replace(found, speedup=max(found.speedup, *(ratio(a, b).low for a, b in totals if a), 0.0))


def kernel_bound(facts: Facts) -> Ceiling | None:
    """Return the upper bound by the kernels of the profiled steps alone."""
    if not timed_a_model(facts) or facts.trial.device == "cpu":
        return None
    bf16, totals = best_bf16(facts), fp8_totals(facts)
    return bound(facts, bf16, [each for each in totals if fair_bf16(facts, each) is bf16]) if bf16 else None


class RelativeSpeed(Struct, frozen=True):
    """A timed step, compared with the BF16 that has the same changes."""

    bf16: Arm
    best: Arm
    """The best BF16 without changes."""
    speedup: Interval
    """Time of ``bf16`` / time of the step."""
    in_bf16: bool
    """True for a step in BF16, which neither gains nor loses by FP8."""
    is_noise: bool
    """True if the timing does not decide between the two."""

    @property
    def gains(self) -> bool:
        return not self.in_bf16 and not self.is_noise and self.speedup.low > 1

    @property
    def loses(self) -> bool:
        return not self.in_bf16 and not self.is_noise and self.speedup.high < 1


def relative_to_bf16(facts: Facts, timed: Arm) -> RelativeSpeed | None:
    """Compare a step with its BF16, None if untimed."""
    best = best_bf16(facts) if recorded(facts, "trial") else None
    if best is None or timed.name == ArmName.WITHOUT_ADAPTERS:
        return None
    base = timed.get("base")
    unconverted = ArmName.AS_IS in (timed.name, base) and not is_conversion(timed.name)
    in_bf16 = is_in_bf16(timed.name) or (unconverted and not uses_fp8(facts))
    bf16 = best if in_bf16 else fair_bf16(facts, timed)
    if bf16 is None:
        return None
    speedup = ratio(bf16, timed)
    return RelativeSpeed(bf16, best, speedup, in_bf16, is_noise(bf16, timed, facts.trial))


def all_fp8_loses(facts: Facts) -> bool:
    """Return whether every timed FP8 step, also of single changes, is clearly slower."""
    timed = (each for each in facts.arms() if each.tried and each.step_ms and not is_withdrawn(each.name))
    found = (if_recorded(relative_to_bf16, facts, each) for each in timed)
    return all(each.loses for each in found if each and not each.in_bf16)
