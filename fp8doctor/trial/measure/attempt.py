"""A variant on its way to a result: the row of the trial's table, with its state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8doctor.analysis.memory import USABLE
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.profiling.profiled_step import ProfiledStep
from fp8doctor.stacks import NoCounterpart
from fp8doctor.trial.copies.depth import Plan, in_words
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.copies.step import VariantPlan
from fp8doctor.trial.measure.evidence import Compilations, StepProof
from fp8doctor.trial.measure.memory import StepMemory, full_peak
from fp8doctor.wording import percent, sentence

HOST_SHARE = 0.9
"""Share of a step that begins with an idle GPU after which the host has launched all of it, from which the
step waits for the host. A choice; a step that was idle for 15% of the time had more than 0.8 (H200)."""

ALIKE = 1.01
"""Peak / peak of the step as it is that counts as equal: extrapolated peaks were within 1%."""


@dataclass
class Ready:
    """A variant at one depth, warm and ready to be timed."""

    step: Callable[[], torch.Tensor]
    model: nn.Module
    """The replica that the step trains."""
    compiled: Compilations
    memory: StepMemory
    step_s: float
    """The last step of the warm-up: about what one step takes."""
    launched_s: float | None
    """Its part until the host had launched all of it; None on a CPU."""
    non_finite: tuple[str, ...] | None
    """Names of what was NaN or infinite in the warm-up, as `Arm.non_finite`."""
    frames_in_window: int = 0


@dataclass
class Attempt:
    """A variant: waiting, built (a `Ready` per depth), timed, or without a number for a reason."""

    plan: VariantPlan
    ready: list[Ready] = field(default_factory=list)
    no_number: NoNumber | None = None
    proof: StepProof | None = None
    build_s: float = 0.0
    profiled: tuple[ProfiledStep, ...] | None = None
    """One profiled step per depth; empty if profiling failed, None if it was not asked for."""

    def full_peak(self, plan: Plan) -> float | None:
        """Extrapolate the peak to full depth; None if a depth is missing, and on a CPU."""
        return full_peak(plan, [each.memory for each in self.ready])

    @property
    def why(self) -> Reason | None:
        return self.no_number.why if self.no_number else None

    @property
    def steps_s(self) -> float:
        return sum(each.step_s for each in self.ready)

    @property
    def compiled(self) -> bool:
        """Return whether something was compiled for it."""
        return any(ready.compiled.get("graphs") for ready in self.ready)

    @property
    def waits_for_host(self) -> bool:
        """Return whether the host sets the pace of its deepest step on a GPU."""
        last = self.ready[-1] if self.ready else None
        return bool(last and last.launched_s and last.launched_s >= HOST_SHARE * last.step_s)


def raised(error: Exception) -> NoNumber:
    """Explain why a variant that raised this has no number."""
    if isinstance(error, torch.OutOfMemoryError):
        return NoNumber(Reason.OUT_OF_MEMORY, "the GPU has too little memory left for it")
    if isinstance(error, (NoCounterpart, NotReplicable)):
        why = Reason.NOT_APPLICABLE if isinstance(error, NoCounterpart) else Reason.NOT_REPLICABLE
        return NoNumber(why, str(error))
    return NoNumber(Reason.RAISES, f"it raises {sentence(error)}")


def beyond_gpu(
    attempt: Attempt, attempts: Sequence[Attempt], plan: Plan, gpu_gib: float | None
) -> NoNumber | None:
    """Explain why a truncated variant does not fit at full depth; None if it may.

    A change, and BF16 without checkpointing, may fill the usable share of ``gpu_gib``, or take what the step
    as it is takes, which may run on more GPUs. Other BF16 may too.
    """
    as_is = next((each for each in attempts if each.plan.name == ArmName.AS_IS), None)
    if gpu_gib is None or as_is is None or attempt is as_is or plan.whole:
        return None
    now, own = as_is.full_peak(plan), attempt.full_peak(plan)
    if now is None or own is None:
        return None
    changes = attempt.plan.treatments or attempt.plan.name == ArmName.BF16_WITHOUT_CHECKPOINTING
    counts = changes or (attempt.plan.name in BF16_BASELINES and now <= gpu_gib)
    if not counts or own <= (max(USABLE * gpu_gib, ALIKE * now) if changes else gpu_gib):
        return None
    cuts = " and ".join(map(in_words, plan.cuts))
    usable = f", of which a step may fill {percent(100 * USABLE)}" if changes else ""
    return NoNumber(
        Reason.DOES_NOT_FIT,
        f"its step takes {own:.1f} GiB at full depth, modelled from cuts to {cuts} blocks, "
        f"and the GPU has {gpu_gib:.1f} GiB for it{usable}",
    )


Samples = dict[tuple[str, int], list[float]]
"""Step times in ms by variant and number of the depth, one per round."""


def full_ms(plan: Plan, samples: Samples, variant: VariantPlan) -> list[float]:
    """Extrapolate the step to full depth, round by round."""
    return [
        plan.full(values)
        for values in zip(*(samples[variant.name, number] for number in range(len(plan.cuts))), strict=True)
    ]
