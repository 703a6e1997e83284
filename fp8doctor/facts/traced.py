"""A step in a trace of the user's own profiler."""

from typing import Literal

from fp8doctor.facts.record import Record
from fp8doctor.facts.trial import Family

IdleCause = Literal[
    "late_launch", "data_loader", "synchronization", "host_copy", "compilation", "in_time", "unknown"
]
"""Why the GPU had nothing to do: the host launched too late; it fetched a batch; it had waited for the GPU
and began again; it was inside a copy to or from the GPU; torch.compile worked; the next kernel was launched
before the GPU ran dry; the trace does not tell the launch."""


class TracedKernel(Record, frozen=True, kw_only=True):
    """All work of one name and family, a step."""

    name: str
    family: Family
    operator: str | None
    """The operator that launched it; None if none did, or several."""
    count: float
    """A step; no whole number if steps differ."""
    time_ms: float


class TracedStep(Record, frozen=True, kw_only=True):
    """The mean of a trace's steps. Families and idle times add up to ``step_ms``."""

    file: str
    """Name without its folder."""
    gpu: str | None
    """None if the trace does not name it."""
    gpus: int
    """GPUs that worked in the trace; the times are of the one that worked longest."""
    rank: int | None
    world_size: int | None
    """None if the trace is not of a distributed job."""
    steps: int
    """Steps that the times are the mean of; 0 if no steps are marked, so that they are of the whole."""
    marked_by: Literal["profiler", "optimizer"] | None
    """``ProfilerStep#`` of torch.profiler, or the ends of ``Optimizer.step#``; None without either."""
    compiling_steps: int
    """Steps in which torch.compile worked; left out if others are."""
    compiled: bool
    """True if torch.compile worked in what was counted."""
    step_ms: float
    low_ms: float
    """Shortest of the steps."""
    high_ms: float
    busy_ms: float
    """At least one stream of the GPU worked."""
    families_ms: dict[str, float]
    """`Family` -> time in ms. Every instant has one owner, so that they add up to ``busy_ms``."""
    idle_ms: dict[str, float]
    """`IdleCause` -> time in ms."""
    outside_ms: float
    """GPU time in the whole trace that belongs to none of the steps, left out."""
    with_stack: bool
    """True if the profiler recorded Python's calls, which slows the host most."""
    kernels: tuple[TracedKernel, ...]
    """The longest first; they add up to ``busy_ms``."""

    def of_family(self, family: Family) -> tuple[TracedKernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.family == family)

    @property
    def gpu_idle_ms(self) -> float:
        return sum(self.idle_ms.values())
