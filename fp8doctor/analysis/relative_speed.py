"""How fast one timed step is beside the best BF16 that has the same changes."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.analysis.arms import arm, best_bf16, fair_bf16, ratio, uses_fp8
from fp8doctor.analysis.median_interval import Interval
from fp8doctor.analysis.outcome import is_noise
from fp8doctor.facts import Arm, Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import IN_BF16, ArmName, in_first_window, is_conversion, is_of_first_window


class RelativeSpeed(Struct, frozen=True):
    """A timed step, held to BF16."""

    bf16: Arm
    speedup: Interval
    """Time of BF16 / time of the step."""
    in_bf16: bool
    """Whether the step is one in BF16 itself, which neither gains nor loses by FP8."""
    is_noise: bool
    """Whether the timing does not tell which of the two is faster."""

    @property
    def gains(self) -> bool:
        return not self.in_bf16 and not self.is_noise and self.speedup.low > 1

    @property
    def loses(self) -> bool:
        return not self.in_bf16 and not self.is_noise and self.speedup.high < 1


def beside_bf16(facts: Facts, timed: Arm) -> RelativeSpeed | None:
    """Hold a step to the best BF16 of its like, as its own window saw it; None where that was not timed, as
    of a step without its adapters."""
    best = best_bf16(facts) if recorded(facts, "trial") else None
    if best is None or timed.name == ArmName.WITHOUT_ADAPTERS:
        return None
    base = timed.base if recorded(timed, "base") else None
    unconverted = ArmName.AS_IS in (timed.name, base) and not is_conversion(timed.name)
    in_bf16 = timed.name in IN_BF16 or (unconverted and not uses_fp8(facts))
    bf16 = best if in_bf16 else fair_bf16(facts, timed)
    if bf16 is None:
        return None
    if base and is_of_first_window(base):
        bf16 = arm(facts.trial, in_first_window(bf16.name)) or bf16
    speedup = ratio(bf16, timed)
    return RelativeSpeed(bf16, speedup, in_bf16, is_noise(bf16, timed, facts.trial))


def all_fp8_loses(facts: Facts) -> bool:
    """Whether every step in FP8 that was timed is slower than BF16 beyond the noise, those of single changes
    too."""
    timed = (
        each for each in facts.arms() if each.tried and each.step_ms and not is_of_first_window(each.name)
    )
    found = (if_recorded(beside_bf16, facts, each) for each in timed)
    return all(each.loses for each in found if each and not each.in_bf16)
