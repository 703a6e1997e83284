"""The whole step of a job on several GPUs: its compute as timed on copies, its communication as it ran."""

from __future__ import annotations

from statistics import median

from msgspec import Struct

from fp8doctor.analysis.rank_comparison import exposed_ms
from fp8doctor.analysis.significance import EVEN
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import in_ms, in_times, percent


class WholeStep(Struct, frozen=True):
    """A step of the job itself, in ms."""

    step_ms: float
    """Median of the watched steps."""
    communication_ms: float
    """Of a profiled step: what no other work of the GPU covered."""
    waiting_ms: float = 0.0
    """What its step takes beyond its copy's and communication, as the job's GPU waits."""

    @property
    def communication_pct(self) -> float:
        return 100 * self.communication_ms / self.step_ms

    def speedup(self, compute: float) -> float:
        """Return the speedup of the whole step if its compute has this one and communication stays.

        It is the least if the GPU waits, as a slower BF16 may wait as long.
        """
        compute_ms = self.step_ms - self.communication_ms - self.waiting_ms
        return (self.communication_ms + compute_ms * compute) / self.step_ms

    def speedup_with(self, compute: float) -> float:
        """Return the same for a change that the job does not have yet: the most if the GPU waits."""
        return 1 / self.speedup(1 / compute)


def timed_alone(facts: Facts) -> bool:
    """Tell if the timed copies lack the communication that the job has."""
    distributed = facts.get("training.distributed")
    spread = distributed is not None and (distributed.world_size > 1 or distributed.wrapper is not None)
    return spread and bool(facts.get("trial.arms", ()))


def whole_step(facts: Facts) -> WholeStep | None:
    """Return the job's own step; None if no step was profiled on a GPU."""
    observed = facts.observed
    communication_ms = exposed_ms(observed)
    if communication_ms is None or not observed.steps_ms:
        return None
    step_ms = median(observed.steps_ms)
    copy = next((each for each in facts.arms() if each.name == ArmName.AS_IS and each.tried), None)
    waiting_ms = step_ms - communication_ms - copy.step_ms if copy and copy.step_ms else 0.0
    if waiting_ms < EVEN * step_ms:
        waiting_ms = 0.0
    return WholeStep(step_ms, min(communication_ms, step_ms), waiting_ms)


def whole_step_in_words(facts: Facts, now: float | None, later: float | None) -> str:
    """Estimate the speedup of the whole step; empty if the copies are all of it.

    ``now`` is the compute's speedup of the FP8 that runs, ``later`` that of an FP8 that the job may get.
    """
    if not timed_alone(facts) or not (now or later):
        return ""
    step = if_recorded(whole_step, facts)
    if step is None:
        return "Compute alone: how much of the step is communication was not profiled."
    share = f"{percent(step.communication_pct)} of it is communication that no compute covers"
    if step.waiting_ms:
        bounds = _of_waiting(step, now, later or 1.0)
        return f"{bounds} (estimated): {share}, and its GPU waits {in_ms(step.waiting_ms)}."
    speedup = step.speedup(now) if now else step.speedup_with(later or 1.0)
    size = in_times(max(speedup, 1 / speedup))
    change = f"{size} {'faster' if speedup >= 1 else 'slower'}"
    return f"The whole step {'is' if now else 'would be'} about {change} (estimated): {share}."


def _of_waiting(step: WholeStep, now: float | None, later: float) -> str:
    """Bound the speedup if the job's GPU waits: a change of compute may also change how long it waits.

    FP8 launches more kernels, so a wait for the host may only be longer than in BF16.
    """
    if now is None:
        return f"The whole step would be at most {in_times(step.speedup_with(later))} the speed of now"
    low = step.speedup(now)
    high = low + step.waiting_ms / step.step_ms
    return f"The whole step runs at {in_times(low)} to {in_times(high)} the speed of BF16"
