"""The whole step of a job on several GPUs: its compute as timed on copies, the rest as it ran.

The job's profiled step has more than its copy's: communication, casts of gathered FP8 weights, other kernels
of its wrapper (DDP, FSDP), and idle time. A BF16 step has the other kernels too. It may have work in place
of the casts, wait as long, and cover as little of its communication, or none of these: that gives its bounds.
"""

from __future__ import annotations

from statistics import median

from msgspec import Struct

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.rank_comparison import exposed_ms, exposed_of_ranks
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.waiting import script_overhead
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import in_times

MOST_SLOWER = 0.1
"""Share of the job's step by which a copy may take longer. A choice: a copy with Transformer Engine took 7%
longer on a busy host, and its bounds held."""


class WholeStep(Struct, frozen=True):
    """A step of the job itself, in ms: its copy's and all that comes on top."""

    step_ms: float
    """Median of the watched steps."""
    copy_ms: float
    """The copy of the step as it is."""
    communication_ms: float
    """Of a profiled step: what no other work of the GPU covered, on the rank that has the least of it."""
    casts_ms: float
    """Casts beyond the copy's, such as those before an all-gather in FP8."""
    waiting_ms: float
    """Idle time beyond the copy's."""
    ranks_ms: float
    """What this rank's communication takes longer than the least: it waits for another rank there."""

    @property
    def is_known(self) -> bool:
        """Whether the copy, which has less to do, took no longer than the job's step, or little longer."""
        return self.copy_ms <= (1 + MOST_SLOWER) * self.step_ms

    @property
    def on_top_ms(self) -> float:
        return max(0.0, self.step_ms - self.copy_ms)

    @property
    def kernels_ms(self) -> float:
        """Kernels of the wrapper, which a change of compute leaves."""
        others = self.communication_ms + self.casts_ms + self.waiting_ms + self.ranks_ms
        return max(0.0, self.on_top_ms - others)

    def over_bf16(self, bf16_ms: float) -> tuple[float, float]:
        """Bound the speedup over a BF16 step whose copy takes ``bf16_ms``.

        At least, it has no casts, waits for nothing, and covers communication for as long as it computes
        longer than FP8; all of it if FP8 waits for the host, which starts communication late. At most, all
        that FP8 has on top stays.
        """
        covered = self.communication_ms if self.waiting_ms else max(0.0, bf16_ms - self.copy_ms)
        exposed = max(0.0, self.communication_ms - covered)
        high = max(self.on_top_ms, self.communication_ms)
        return (bf16_ms + self.kernels_ms + exposed) / self.step_ms, (bf16_ms + high) / self.step_ms

    def with_fp8(self, bf16_ms: float, fp8_ms: float) -> float:
        """Return the most that the FP8 of a copy of ``fp8_ms`` gains: it waits at least as long.

        Its script may wait longer, because FP8 launches more: 1.10x of copies was 0.93x of scripts on an H100
        (FSDP2, research/benchmarks/results/sharded_trials_h100.md).
        """
        return (bf16_ms + self.on_top_ms) / (fp8_ms + self.on_top_ms)


def timed_alone(facts: Facts) -> bool:
    """Tell if the timed copies lack the communication that the job has, or take less than its own step."""
    spread = _is_spread(facts) and any(each.tried for each in facts.arms())
    return spread or bool(if_recorded(script_overhead, facts))


def _is_spread(facts: Facts) -> bool:
    distributed = facts.get("training.distributed")
    return distributed is not None and (distributed.world_size > 1 or distributed.wrapper is not None)


def whole_step(facts: Facts) -> WholeStep | None:
    """Return the job's own step; None if no step was profiled on a GPU, or no copy of it was timed."""
    observed = facts.observed
    own_ms, copy = exposed_ms(observed), arm(facts.trial, ArmName.AS_IS)
    if own_ms is None or not observed.steps_ms or copy is None or not copy.step_ms:
        return None
    step_ms = median(observed.steps_ms)
    least_ms = min([own_ms, *exposed_of_ranks(facts)])
    casts_ms, waiting_ms = 0.0, step_ms - copy.step_ms - own_ms
    parts = copy.get("breakdown")
    if parts is not None and recorded(parts, "families_ms"):
        job = observed.breakdown
        casts_ms = max(0.0, job.families_ms.get("cast", 0.0) - parts.families_ms.get("cast", 0.0))
        waiting_ms = max(0.0, job.idle_ms - parts.idle_ms)
    if waiting_ms < EVEN * step_ms:
        waiting_ms = 0.0
    communication_ms = min(least_ms, step_ms)
    return WholeStep(step_ms, copy.step_ms, communication_ms, casts_ms, waiting_ms, own_ms - least_ms)


def whole_speedup(
    facts: Facts, now: float | None, later: float | None, bf16_ms: float | None
) -> tuple[float, float] | None:
    """Bound the whole step's speedup over the best BF16; None if the copies are all of it, or it is unknown.

    ``now`` is the compute's speedup of the FP8 that runs, ``later`` that of an FP8 that the job may get. Of a
    job of one process only the most is known: BF16 may wait as long as FP8.
    """
    step = if_recorded(whole_step, facts) if timed_alone(facts) and bf16_ms else None
    if step is None or bf16_ms is None or not step.is_known:
        return None
    if now:
        low, high = step.over_bf16(step.copy_ms * now)
        return (low if _is_spread(facts) else 0.0), high
    return (0.0, step.with_fp8(bf16_ms, bf16_ms / later)) if later else None


def in_bounds(low: float, high: float) -> str:
    """Write a speedup as one number if its bounds are close to each other, else as both."""
    if not low:
        return f"at most {in_times(high)} the speed of BF16"
    close = high - low < EVEN
    if low > 1 - EVEN and high < 1 + EVEN:
        return "about as fast as BF16"
    if not close and low < 1 < high:
        return f"{in_times(low)} to {in_times(high)} the speed of BF16"
    sizes = [(low + high) / 2] if close else [low, high]
    if sizes[0] >= 1:
        return f"{'about ' if close else ''}{' to '.join(map(in_times, sizes))} faster"
    slower = " to ".join(in_times(1 / each) for each in reversed(sizes))
    return f"{'about ' if close else ''}{slower} slower"
