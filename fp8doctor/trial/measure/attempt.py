"""A variant on its way to a result, and the step times of a window."""

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
from fp8doctor.trial.measure.peak_memory import Held, Turn, full_peak
from fp8doctor.trial.variant import VariantPlan
from fp8doctor.wording import sentence


@dataclass
class Ready:
    """A variant at one depth, warm and ready to be timed."""

    step: Callable[[], torch.Tensor]
    model: nn.Module | None
    """The replica that the step trains; None after it was freed."""
    compiled: Compilations
    held: Held
    peak_gib: float | None
    alloc_retries: int | None
    warm_up_s: float
    step_s: float
    """The last step of the warm-up: about what one step takes."""
    non_finite: tuple[str, ...] | None
    """Names of what was NaN or infinite in the warm-up, as `Arm.non_finite`."""
    frames_in_window: int = 0
    turn: Turn | None = None
    """None on a CPU."""


@dataclass
class Attempt:
    """A variant on its way to a result: a `Ready` per depth, or why there is none."""

    plan: VariantPlan
    ready: list[Ready] = field(default_factory=list)
    no_number: NoNumber | None = None
    proof: StepProof | None = None
    build_s: float = 0.0
    profiled: tuple[ProfiledStep, ...] | None = None
    """One profiled step per depth; empty if profiling failed, None if it was not asked for."""

    def full_peak(self, plan: Plan) -> float | None:
        """Extrapolate the peak to full depth; None if a depth is missing, and on a CPU."""
        if len(self.ready) != len(plan.cuts):
            return None
        peaks, holds = [each.peak_gib for each in self.ready], [each.held for each in self.ready]
        return full_peak(plan, peaks, holds, [each.turn for each in self.ready])

    @property
    def why(self) -> Reason | None:
        return self.no_number.why if self.no_number else None


def raised(error: Exception) -> NoNumber:
    """Make the reason of a variant whose step raises."""
    if isinstance(error, torch.OutOfMemoryError):
        return NoNumber(Reason.OUT_OF_MEMORY, "the GPU has too little memory left for it")
    if isinstance(error, OriginalTouched):
        return NoNumber(Reason.NOT_REPLICABLE, str(error))
    return NoNumber(Reason.RAISES, f"it raises {sentence(error)}")


Samples = dict[tuple[str, int], list[float]]
"""Step times in ms by variant and number of the depth, one per round."""


def full_ms(plan: Plan, samples: Samples, variant: VariantPlan) -> list[float]:
    """Extrapolate the step to full depth, round by round, for the job's own tokens."""
    return [
        plan.full(values) / variant.tokens_ratio
        for values in zip(*(samples[variant.name, number] for number in range(len(plan.cuts))), strict=True)
    ]
