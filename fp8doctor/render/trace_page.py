"""A trace of a user's profiler as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8doctor.diagnosis.traces import Hint, Traces, digits
from fp8doctor.facts.traced import TracedKernel, TracedStep
from fp8doctor.render.table_page import Sheet, Table
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

ALL = "all"

SHOWN_KERNELS = 5
"""Kernels of a list that are shown without ``-v``."""

NAMES_LENGTH = 120
"""Characters of a kernel's name that are shown without ``-v``."""


def page(document: Traces, *, verbose: bool = False) -> Sheet:
    """Lay out what the trace says; ``verbose`` shows every kernel."""
    step = document.steps[0]
    return Sheet(
        (f"fp8doctor {document.tool.version}", *_named(step)),
        document.summaries,
        (_times(step), *_kernels(step, verbose=verbose), *_hints(document.hints[0])),
        _basis(step),
    )


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


def _rows(step: TracedStep) -> dict[str, float]:
    """List the parts of the step by their names; families first, the longest first."""
    busy = {FAMILIES[family]: ms for family, ms in step.families_ms.items()}
    return busy | {IDLE[cause]: ms for cause, ms in step.idle_ms.items()}


def _times(step: TracedStep) -> Table:
    places = digits(step.step_ms)
    rows = {name: ms for name, ms in _rows(step).items() if ms >= 0.5 * 10**-places} | {ALL: step.step_ms}
    return Table(
        ("ms/step" if step.steps else "ms in all", "", "share"),
        tuple((name, f"{ms:,.{places}f}", percent(100 * ms / step.step_ms)) for name, ms in rows.items()),
    )


def change(ms: float, places: int) -> str:
    """Write a change in ms with its sign; ``-`` if it would be zero."""
    shown = f"{abs(ms):,.{places}f}"
    return f"{'−' if ms < 0 else '+'}{shown}" if float(shown.replace(",", "")) else "-"


def _kernels(step: TracedStep, *, verbose: bool) -> Iterator[Table | str]:
    """List FP8 matmul kernels, those that no rule knows, and with ``verbose`` all."""
    if verbose:
        yield _listed("all work", step.kernels, step, more=None)
        return
    for title, family in (("FP8 matmuls", "gemm_fp8"), ("unknown kernels", "unknown")):
        found = [kernel for kernel in step.kernels if kernel.family == family]
        if found:
            share = percent(100 * step.families_ms[family] / step.step_ms)
            yield _listed(f"{title}, {share}", found[:SHOWN_KERNELS], step, more=len(found) - SHOWN_KERNELS)


def _listed(title: str, kernels: Sequence[TracedKernel], step: TracedStep, more: int | None) -> Table:
    places = max(2, digits(step.step_ms))
    rows = [
        (
            _count(kernel.count),
            f"{kernel.time_ms:,.{places}f}",
            (kernel.name or "(without a name)")
            if more is None
            else _shortened(kernel.name or "(without a name)"),
        )
        for kernel in kernels
    ]
    if more is None:
        return Table(
            (title, "count", "ms"),
            tuple((FAMILIES[kernel.family], *row) for kernel, row in zip(kernels, rows, strict=True)),
            text="kernel",
        )
    if more > 0:
        rows.append(("", "", f"and {more} more; -v shows all"))
    return Table((title, "count", "ms"), tuple(("", *row) for row in rows), text="kernel")


def _shortened(name: str) -> str:
    return name if len(name) <= NAMES_LENGTH else f"{name[: NAMES_LENGTH - 3]}..."


def _count(count: float) -> str:
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def _hints(hints: Sequence[Hint]) -> Iterator[str]:
    for hint in hints:
        more = f" (fp8doctor explain {hint.code})" if hint.code else ""
        yield f"Look at: {hint.text}{more}."


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
