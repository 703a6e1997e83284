"""The timed steps: variants of a trial with their proofs, the user's own that were watched, on each rank, and
those of a trace."""

from typing import Annotated, Literal

from msgspec import Meta

from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.record import NOT_RECORDED, Prose, Record

Family = Literal[
    "gemm_fp8",
    "gemm_16bit",
    "gemm_fp32",
    "cast",
    "attention",
    "norm",
    "pointwise",
    "optimizer",
    "loss",
    "communication",
    "copy",
    "unknown",
]
"""Work of a GPU kernel; ``pointwise`` covers reductions, gathers and fills too."""


class KernelGroup(Record, frozen=True, kw_only=True):
    """All kernels of one name in one step of the deepest cut."""

    name: str = NOT_RECORDED
    family: Family = NOT_RECORDED
    operator: str | None = NOT_RECORDED
    """The operator that launched them, such as ``aten::_scaled_mm``; None if none did, or several."""
    count: int = NOT_RECORDED
    time_ms: float = NOT_RECORDED


class Breakdown(Record, frozen=True, kw_only=True):
    """One variant's step in parts at full depth, from profiled steps; they and ``idle_ms`` add up to it."""

    families_ms: dict[str, float] = NOT_RECORDED
    """`Family` -> time in ms, every instant with one owner, already divided by ``scale``."""
    idle_ms: float = NOT_RECORDED
    """Unprofiled step - time the GPU was busy; 0 if the profiled kernels took longer than the step."""
    host_wait_pct: float | None = NOT_RECORDED
    """Share of the profiled gaps that ended with a kernel launched too late; None without gaps."""
    busy_ms: float = NOT_RECORDED
    """Union of all kernels as profiled, less what communication waited for beyond the unprofiled step."""
    scale: float = NOT_RECORDED
    """``busy_ms`` / step if the profiled kernels took longer than the unprofiled step, else 1."""
    reliable: bool = NOT_RECORDED
    """True if ``scale`` and the depth's extrapolation leave the parts meaningful."""
    kernels: int = NOT_RECORDED
    """Kernels a step at full depth."""
    unclassified_pct: float = NOT_RECORDED
    """Share of the busy time in kernels that no rule knows."""
    groups: tuple[KernelGroup, ...] = NOT_RECORDED
    """The longest, then every one that no rule knows, at most a few."""


class MemoryParts(Record, frozen=True, kw_only=True):
    """Parts of a variant's peak at full depth, which they add up to."""

    weights_gib: float = NOT_RECORDED
    gradients_gib: float = NOT_RECORDED
    """All of them, as they lie together when the optimizer begins its step."""
    optimizer_gib: float = NOT_RECORDED
    activations_gib: float = NOT_RECORDED
    """The rest of the peak: saved activations and temporaries, more if it comes before the last gradient."""


class ArmCut(Record, frozen=True, kw_only=True):
    """One variant at one cut of the model."""

    blocks: dict[str, int] = NOT_RECORDED
    """List of blocks -> how many were kept; empty if the model was measured whole."""
    step_ms: float | None = NOT_RECORDED
    graph_breaks: int = NOT_RECORDED
    break_reasons: tuple[Prose, ...] = NOT_RECORDED
    """Why Dynamo broke the graph, in its own words, each once, at most a few."""
    recompilations: int = NOT_RECORDED
    """Frames compiled again because a guard failed, from the first step on."""
    recompile_reasons: tuple[Prose, ...] = NOT_RECORDED
    left_eager: tuple[str, ...] = NOT_RECORDED
    """Functions that reached the recompile limit, so further calls are not compiled."""


class Arm(Record, frozen=True, kw_only=True):
    """One variant of the training step: its time, and the proof of what it ran."""

    name: str = NOT_RECORDED
    """An `ArmName`, a conversion, or a treatment's name; ``..._first`` is replaced in an older report."""
    treatments: tuple[str, ...] = NOT_RECORDED
    base: str | None = NOT_RECORDED
    """The variant that this one changes, so that the difference is what the change saves; None if none."""
    tried: bool = NOT_RECORDED
    why: Reason | None = NOT_RECORDED
    """Why it was not tried, or has no number; None if it has. `fp8doctor.facts.no_number.why_of` reads it."""
    reason: Prose | None = NOT_RECORDED
    """The same in a sentence for people."""
    step_ms: float | None = NOT_RECORDED
    """Median at full depth; measured when the model was timed whole, else predicted from the cuts."""
    low_ms: float | None = NOT_RECORDED
    high_ms: float | None = NOT_RECORDED
    """Holds the true median with 90% confidence; the range of two to four rounds, None of one."""
    rounds_ms: tuple[float, ...] = NOT_RECORDED
    """One figure per interleaved round, whose clocks and heat the variants of a window share."""
    peak_gib: float | None = NOT_RECORDED
    """None on a CPU. If the cuts leave it open it is not recorded, and a gap says between what it is."""
    tokens_ratio: float = NOT_RECORDED
    """Tokens of its step / those of the step as it is, for as many of which its times are given."""
    cuts: tuple[ArmCut, ...] = NOT_RECORDED
    breakdown: Breakdown | None = NOT_RECORDED
    """None for a variant that was not profiled; not recorded if profiling failed, and a gap says why."""
    memory: MemoryParts | None = NOT_RECORDED
    """None on a CPU, without ``peak_gib``, and if its optimizer does not tell when its step begins."""
    fp8_gemms: int | None = NOT_RECORDED
    """FP8 matmuls in one step of the deepest cut: kernels on CUDA, operators on a CPU."""
    graphs_run: int | None = NOT_RECORDED
    """Compiled regions entered in that step."""
    non_finite: tuple[str, ...] | None = NOT_RECORDED
    """Kinds of NaN or infinity while it warmed up: ``loss``, ``gradients``; empty without any, None if nobody
    could see. Such gradients are set to zero before every update, so that the weights, which the variants
    share, stay finite; that is in the variant's time, a read and a write of all gradients (computed: 7 ms for
    an 8B model on an H200)."""


class Health(Record, frozen=True, kw_only=True):
    """The GPU while the variants were timed, as NVML saw it, sampled."""

    samples: int = NOT_RECORDED
    sm_clock_low_mhz: int | None = NOT_RECORDED
    sm_clock_high_mhz: int | None = NOT_RECORDED
    other_use_pct: float | None = NOT_RECORDED
    """Most of the GPU that they used at one time; None if NVML does not tell."""


class HostLoad(Record, frozen=True, kw_only=True):
    """The host while variants were timed."""

    pace_low_ms: float = NOT_RECORDED
    """Fastest time of a fixed piece of Python, timed once a visit."""
    pace_median_ms: float = NOT_RECORDED


class Trial(Record, frozen=True, kw_only=True):
    """The timed probe."""

    device: str = NOT_RECORDED
    gpu: str | None = NOT_RECORDED
    blocks: dict[str, int] = NOT_RECORDED
    """Lists of blocks that were cut -> blocks at full depth; empty if the model was measured whole."""
    arms: tuple[Arm, ...] = NOT_RECORDED
    self_check_ratio: float | None = NOT_RECORDED
    """BF16 / its own replica; 1.00 when nothing disturbed the timing."""
    reliable: bool = NOT_RECORDED
    why: Reason | None = NOT_RECORDED
    """Why nothing was timed; None if something was."""
    reason: Prose | None = NOT_RECORDED
    """Why nothing was timed, or why the times are not reliable, in sentences for people."""
    harm: tuple[str, ...] = NOT_RECORDED
    """State outside of the trial's copies that was not as before, put back if possible: of files in the
    current folder and memory of the GPU others may be the cause. Empty without any."""
    health: Health | None = NOT_RECORDED
    """None on a CPU."""
    host: HostLoad = NOT_RECORDED
    """Not recorded if the system does not tell."""
    rows: dict[str, tuple[int, ...]] = NOT_RECORDED
    """As `Workload.rows`, where they are now; recordings until November 2026 have a trial's here."""
    gaps: dict[str, Prose] = NOT_RECORDED
    """Dotted path of a fact of the trial that is missing, such as ``trial.numerics`` -> the reason."""
    budget_s: float | None = NOT_RECORDED
    enough_s: float | None = NOT_RECORDED
    """Budget in which the variants that were left out for time are expected to fit too, or those that decide
    if one of them was; None if none was, and if nothing tells."""
    elapsed_s: float | None = NOT_RECORDED
    """Seconds from the start of the command to the end of the trial; of the trial alone if a script is
    watched, and in recordings of commands whose budget began with the trial."""


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
