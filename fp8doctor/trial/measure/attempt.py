"""An arm on its way to a result, and the step times of a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.profiling.profiled_step import ProfiledStep
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.copies.replica import OriginalTouched
from fp8doctor.trial.measure.evidence import Compilations, StepProof
from fp8doctor.trial.measure.peak_memory import FullPeak, Held, Turn, full_peak
from fp8doctor.trial.variant import ArmPlan
from fp8doctor.wording import sentence


@dataclass
class Ready:
    """An arm at one cut, warm and ready to be timed."""

    step: Callable[[], torch.Tensor]
    model: nn.Module | None
    """The replica that the step trains; None once it was let go of."""
    compiled: Compilations
    held: Held
    peak_gib: float | None
    alloc_retries: int | None
    warm_up_s: float
    step_s: float
    """The last step of the warm-up: about what one step takes."""
    non_finite: tuple[str, ...] | None
    """What was NaN or infinite while it warmed up, as `Arm.non_finite`."""
    frames_in_window: int = 0
    from_caches_s: float = 0.0
    """Seconds that the warm-up took beyond its steps, the compiler's own at most, where all its graphs came
    from the compiler's caches; 0 where one was compiled."""
    turn: Turn | None = None
    """None on a CPU."""
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    """What is called whenever its backward begins."""


@dataclass
class Attempt:
    """An arm on its way to a result: one `Ready` per cut, or the reason why there is none."""

    plan: ArmPlan
    ready: list[Ready] = field(default_factory=list)
    no_number: NoNumber | None = None
    beside: str | None = None
    """The arm beside which it was timed alone, because not all fit at once."""
    proof: StepProof | None = None
    build_s: float = 0.0
    profiled: tuple[ProfiledStep, ...] | None = None
    """One profiled step per cut; empty where profiling failed, None where it was not asked for."""

    def full_peak(self, plan: Plan) -> FullPeak | None:
        """Extrapolate the peak; None where it was not built at every cut, and on a CPU."""
        if len(self.ready) != len(plan.cuts):
            return None
        peaks, holds = [each.peak_gib for each in self.ready], [each.held for each in self.ready]
        return full_peak(plan, peaks, holds, [each.turn for each in self.ready])

    @property
    def why(self) -> Reason | None:
        return self.no_number.why if self.no_number else None


def raised(error: Exception) -> NoNumber:
    """Make the reason of an arm whose step raises."""
    if isinstance(error, torch.OutOfMemoryError):
        return NoNumber(Reason.OUT_OF_MEMORY, "the GPU's memory is too small for it")
    if isinstance(error, OriginalTouched):
        return NoNumber(Reason.NOT_REPLICABLE, str(error))
    return NoNumber(Reason.RAISES, f"it raises {sentence(error)}")


Samples = dict[tuple[str, int], list[float]]
"""Step times in ms by arm and number of the cut, one per round."""


def full_ms(plan: Plan, samples: Samples, arm: ArmPlan) -> list[float]:
    """Extrapolate the step to full depth, for as many tokens as the step as it is has: one figure per round,
    which shares clocks and heat."""
    return [
        plan.full(values) / arm.tokens_ratio
        for values in zip(*(samples[arm.name, number] for number in range(len(plan.cuts))), strict=True)
    ]


@dataclass
class Final:
    """Arms that take the place of the first window's arms of the same name."""

    attempts: list[Attempt]
    samples: Samples
    timed_again: bool = False
    """Whether the samples are of a window of their own; else of the first."""
