"""The timed probe: variants of the step, their times and their proofs."""

from typing import Literal

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
