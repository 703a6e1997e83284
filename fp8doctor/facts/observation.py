"""The user's own training steps: those that ``fp8doctor run`` watched, on each rank, and those of a trace."""

from typing import Annotated, Literal

from msgspec import Meta

from fp8doctor.facts.record import NOT_RECORDED, Prose, Record
from fp8doctor.facts.trial import Breakdown, Family


class Observation(Record, frozen=True, kw_only=True):
    """A window of real steps, each from the end of one optimizer step to the next."""

    steps_ms: tuple[float, ...] = NOT_RECORDED
    """Of every step in the window, in their order."""
    clock: Literal["cuda", "host"] = NOT_RECORDED
    """Clock of the steps: events of the GPU, or the host."""
    behind_ms: tuple[float, ...] | None = NOT_RECORDED
    """Of every step, how much later the GPU came to its end than the host; None without a GPU."""
    data_ms: tuple[float, ...] | None = NOT_RECORDED
    """Of every step, how long the training thread waited inside torch's DataLoader; with a GPU only as long
    as that had nothing to do. None if no batch came from such a loader."""
    before_forward_ms: tuple[float, ...] | None = NOT_RECORDED
    """Of every step, from its beginning to the first call of the model, waiting for data included; with a GPU
    by its clock. None if no call was seen."""
    calls: Annotated[int, Meta(ge=0)] | None = NOT_RECORDED
    """Training calls of the model in one step; None if they differ or none was seen."""
    backwards: Annotated[int, Meta(ge=0)] | None = NOT_RECORDED
    """Backward passes in one step, which are its micro-batches; None if they differ or none was seen."""
    losses: tuple[float | None, ...] | None = NOT_RECORDED
    """Of every step, the sum of the losses that its backward passes begin at, in this process, with
    the factor of a loss scaler. None within it if one was not finite. None if a step had none."""
    compiled: Annotated[int, Meta(ge=0)] = NOT_RECORDED
    """Frames that Dynamo compiled during the window; a step that compiled tells nothing."""
    peak_gib: float | None = NOT_RECORDED
    """Most memory that torch had allocated on the model's GPU until the window ended, since the process began
    or the script last reset it; None without a GPU."""
    fp8_gemms: int | None = NOT_RECORDED
    """FP8 matmuls (kernels; operators on a CPU) in one more, profiled step; None if the profiler saw none."""
    graphs_run: int = NOT_RECORDED
    """Compiled regions entered in that step."""
    host_copies_ms: float = NOT_RECORDED
    """Copies from the host to the GPU in that step that no other work of the GPU covered."""
    breakdown: Breakdown = NOT_RECORDED
    """Where the step goes, by that profile; parts and ``idle_ms`` add up to the median of ``steps_ms``."""


class NotFinite(Record, frozen=True, kw_only=True):
    """The first step of a script whose loss or gradients were not finite."""

    step: Annotated[int, Meta(ge=1)] = NOT_RECORDED
    """Of the optimizer."""
    what: Literal["loss", "gradients"] = NOT_RECORDED
    where: Prose = NOT_RECORDED
    """Sentences on where it started; empty if that is unknown."""


class Rank(Record, frozen=True, kw_only=True):
    """One process of the job."""

    rank: Annotated[int, Meta(ge=0)] = NOT_RECORDED
    end: Literal["ended", "raised", "killed", "running", "not_seen"] = NOT_RECORDED
    """``killed`` is every end without Python's own: a signal, a crash, ``os._exit``. ``running`` was still
    there when rank 0 had ended."""
    error: Prose | None = NOT_RECORDED
    """First line of the exception that ended it; None if none did."""
    observed: Observation = NOT_RECORDED
    """Its window; not recorded if none was seen."""


class Ranks(Record, frozen=True, kw_only=True):
    """All processes of the job on the host of rank 0."""

    world_size: Annotated[int, Meta(ge=1)] = NOT_RECORDED
    """Processes of the whole job."""
    processes: tuple[Rank, ...] = NOT_RECORDED
    """The host's ranks in order; if the launcher does not give their number, those that reported."""


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
