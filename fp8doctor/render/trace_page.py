"""A trace of a user's profiler as a page."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.diagnosis.traces import Traces, digits
from fp8doctor.facts.traced import TracedKernel, TracedStep
from fp8doctor.render.page import Page, Part, Quiet, Strong, Table
from fp8doctor.wording import percent, plural

FAMILIES = {
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

IDLE = {
    "late_launch": "idle: launched too late",
    "data_loader": "idle: data loader",
    "synchronization": "idle: after synchronizing",
    "host_copy": "idle: host copying",
    "compilation": "idle: compiling",
    "in_time": "idle: between kernels",
    "unknown": "idle: launch unknown",
}

SHOWN_KERNELS = 5
"""Kernels of a list that are shown without ``-v``."""


def page(document: Traces, *, verbose: bool = False) -> Page:
    """Lay out what the trace says; ``verbose`` shows every kernel."""
    step = document.steps[0]
    parts: tuple[Part, ...] = (
        *map(Strong, document.summaries),
        _times(step),
        *_kernels(step, verbose=verbose),
    )
    more = (
        f"Look at: {each.text}{f' (fp8doctor explain {each.code})' if each.code else ''}."
        for each in document.hints[0]
    )
    return Page((f"fp8doctor {document.tool.version}", *_named(step)), (*parts, *more, Quiet(_basis(step))))


def _named(step: TracedStep) -> Iterator[str]:
    """Describe the trace's file, GPU and steps."""
    places = digits(step.step_ms)
    yield step.file
    if step.gpu:
        yield step.gpu
    if step.gpus > 1:
        yield f"the busiest of {step.gpus} GPUs"
    if step.rank is not None and (step.world_size or 1) > 1:
        yield f"rank {step.rank} of {step.world_size}"
    if not step.steps:
        yield f"no steps marked, {step.step_ms:,.{places}f} ms in all"
        return
    spread = f" ({step.low_ms:,.{places}f} to {step.high_ms:,.{places}f})" if step.steps > 1 else ""
    marked = "ProfilerStep" if step.marked_by == "profiler" else "optimizer steps"
    each = " each" if step.steps > 1 else ""
    yield f"{plural(step.steps, 'step')} ({marked}), {step.step_ms:,.{places}f} ms{each}{spread}"


def _times(step: TracedStep) -> Table:
    """List the parts of the step, the longest first, then what the GPU waited for."""
    places = digits(step.step_ms)
    busy = {FAMILIES[family]: ms for family, ms in step.families_ms.items()}
    parts = busy | {IDLE[cause]: ms for cause, ms in step.idle_ms.items()}
    rows = {name: ms for name, ms in parts.items() if ms >= 0.5 * 10**-places} | {"all": step.step_ms}
    return Table(
        ("ms/step" if step.steps else "ms in all", "", "share"),
        tuple((name, f"{ms:,.{places}f}", percent(100 * ms / step.step_ms)) for name, ms in rows.items()),
    )


def change(ms: float, places: int) -> str:
    """Write a change in ms with its sign; ``-`` if it would be zero."""
    shown = f"{abs(ms):,.{places}f}"
    return f"{'−' if ms < 0 else '+'}{shown}" if float(shown.replace(",", "")) else "-"


def _kernels(step: TracedStep, *, verbose: bool) -> Iterator[Table]:
    """List FP8 matmul kernels and those that no rule knows, or with ``verbose`` all."""
    if verbose:
        yield Table(
            ("all work", "count", "ms"),
            tuple(_kernel(each, step, FAMILIES[each.family]) for each in step.kernels),
            "kernel",
        )
        return
    for title, family in (("FP8 matmuls", "gemm_fp8"), ("unknown kernels", "unknown")):
        found = [_kernel(each, step, "") for each in step.kernels if each.family == family]
        if more := found[SHOWN_KERNELS:]:
            found = [*found[:SHOWN_KERNELS], ("", "", "", f"and {len(more)} more; -v shows all")]
        if found:
            share = percent(100 * step.families_ms[family] / step.step_ms)
            yield Table((f"{title}, {share}", "count", "ms"), tuple(found), "kernel")


def _kernel(kernel: TracedKernel, step: TracedStep, family: str) -> tuple[str, ...]:
    whole = kernel.count == round(kernel.count)
    count = f"{kernel.count:,.0f}" if whole else f"{kernel.count:,.1f}"
    return (
        family,
        count,
        f"{kernel.time_ms:,.{max(2, digits(step.step_ms))}f}",
        kernel.name or "(without a name)",
    )


def _basis(step: TracedStep) -> str:
    """Say how the times were taken, and what is not in them."""
    sentences = [
        "Measured by torch's profiler, whose own cost on the host is in the idle time. Every instant has one "
        "owner, so that the parts add up."
    ]
    if step.marked_by == "optimizer":
        sentences.append("Steps end with Optimizer.step, of the class that steps most often.")
    if step.with_stack:
        sentences.append("Stacks were recorded, which slows the host most.")
    if step.compiled:
        sentences.append("torch.compile was at work: this is no step as the job repeats it.")
    elif step.compiling_steps:
        sentences.append(
            f"{plural(step.compiling_steps, 'step')} in which torch.compile was at work left out."
        )
    if step.outside_ms >= 0.5 * 10 ** -digits(step.step_ms):
        sentences.append(f"{step.outside_ms:,.1f} ms of GPU work outside the steps left out.")
    if not step.steps:
        sentences.append("Nothing marks steps: call profiler.step() behind each one for times of a step.")
    return " ".join(sentences)
