"""A trace of a user's profiler as a page."""

from collections.abc import Iterator

from fp8doctor.diagnosis.traces import IDLE, Traces, shown
from fp8doctor.facts.traced import TracedStep
from fp8doctor.render.page import Page, Part, Quiet, Strong, Table
from fp8doctor.wording import percent, plural

FAMILIES: dict[str, str] = {
    "gemm_fp8": "FP8 matmuls",
    "gemm_16bit": "16-bit matmuls",
    "gemm_fp32": "fp32 matmuls",
    "cast": "casts to and from FP8",
    "attention": "attention",
    "norm": "norms",
    "pointwise": "pointwise and others",
    "optimizer": "optimizer",
    "loss": "loss",
    "communication": "communication",
    "copy": "copies",
    "unknown": "unknown kernels",
}

SHOWN_KERNELS = 5
"""Kernels of a family that are shown without ``-v``: of FP8 matmuls, and of those that no rule knows."""


def page(document: Traces, *, verbose: bool = False) -> Page:
    """Lay out what the trace says; ``verbose`` shows every kernel."""
    step = document.steps[0]
    hints = (
        f"Look at: {each.text}{f' (fp8doctor explain {each.code})' if each.code else ''}."
        for each in document.hints[0]
    )
    parts: tuple[Part, ...] = (
        *map(Strong, document.summaries),
        _times(step),
        _kernels(step, verbose=verbose),
    )
    return Page((f"fp8doctor {document.tool.version}", *_named(step)), (*parts, *hints, Quiet(_basis(step))))


def _named(step: TracedStep) -> Iterator[str]:
    ms, marked = f"{shown(step.step_ms)} ms", {"profiler": "ProfilerStep", "optimizer": "optimizer steps"}
    each = f" each ({shown(step.low_ms)} to {shown(step.high_ms)})" if step.steps > 1 else ""
    yield from (step.file, step.gpu or "")
    yield f"the busiest of {step.gpus} GPUs" if step.gpus > 1 else ""
    if step.marked_by:
        yield f"{plural(step.steps, 'step')} ({marked[step.marked_by]}), {ms}{each}"
    else:
        yield f"no steps marked, {ms} in all"


def _times(step: TracedStep) -> Table:
    """List the parts of the step, the longest first, then what the GPU waited for."""
    parts = {FAMILIES[family]: ms for family, ms in step.families_ms.items()}
    parts |= {f"idle: {IDLE[cause]}": ms for cause, ms in step.idle_ms.items()} | {"all": step.step_ms}
    rows = ((name, shown(ms), percent(100 * ms / step.step_ms)) for name, ms in parts.items() if ms >= 0.005)
    return Table(("ms/step" if step.steps else "ms in all", "", "share"), tuple(rows))


def _kernels(step: TracedStep, *, verbose: bool) -> Table:
    """List FP8 matmul kernels and those that no rule knows, or with ``verbose`` all."""
    kernels = step.kernels
    if not verbose:
        kernels = (*step.of_family("gemm_fp8")[:SHOWN_KERNELS], *step.of_family("unknown")[:SHOWN_KERNELS])
    rows = tuple(
        (
            FAMILIES[each.family],
            f"{each.count:,.1f}".removesuffix(".0"),
            shown(each.time_ms),
            each.name or "(without a name)",
        )
        for each in kernels
    )
    return Table(("work" if verbose else "work (-v shows all)", "count", "ms"), rows, "kernel")


def _basis(step: TracedStep) -> str:
    """Say how the times were taken, and what is not in them."""
    left_out = f"{plural(step.compiling_steps, 'step')} in which torch.compile was at work left out."
    told = {
        "Measured by torch's profiler, whose own cost on the host is in the idle time.": True,
        "torch.compile was at work: this is no step as the job repeats it.": step.compiled,
        left_out: step.compiling_steps and not step.compiled,
        f"{shown(step.outside_ms)} ms of GPU work outside the steps left out.": step.outside_ms >= 0.05,
        "Nothing marks steps: call profiler.step() behind each one for times of a step.": not step.steps,
    }
    return " ".join(each for each, holds in told.items() if holds)
