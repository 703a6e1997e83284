"""One or two traces of a user's profiler as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8doctor.diagnosis.traces import Hint, Traces, digits
from fp8doctor.facts.traced import TracedKernel, TracedStep
from fp8doctor.render.table_page import Sheet, Table
from fp8doctor.wording import labels, percent, plural

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
    """Lay out what the traces say; ``verbose`` shows every kernel."""
    steps = document.steps
    heading: tuple[str, ...] = (f"fp8doctor {document.tool.version}",)
    if len(steps) == 1:
        return Sheet(
            (*heading, *_named(steps[0])),
            document.summaries,
            (_times(steps[0]), *_kernels(steps[0], verbose=verbose), *_hints(document.hints[0])),
            _basis(steps),
        )
    parts: list[Table | str] = [f"Unlike: {'; '.join(document.unlike)}."] if document.unlike else []
    parts.append(_side_by_side(steps, difference=document.difference is not None))
    names = labels(steps[0].file, steps[1].file)
    for name, step, summary, hints in zip(names, steps, document.summaries, document.hints, strict=True):
        file, *rest = _named(step)
        parts.append(f"{name}: {' · '.join(rest if name == file else (file, *rest))}. {summary}")
        parts += _kernels(step, verbose=verbose)
        parts += _hints(hints)
    verdict = (document.difference_summary,) if document.difference_summary else ()
    return Sheet((*heading, f"{names[1]} against {names[0]}"), verdict, tuple(parts), _basis(steps))


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


def _side_by_side(steps: Sequence[TracedStep], *, difference: bool) -> Table:
    """Both steps, part by part; with their difference if it is known."""
    first, second = steps
    places = digits(min(step.step_ms for step in steps))
    one, other = _rows(first) | {ALL: first.step_ms}, _rows(second) | {ALL: second.step_ms}
    names = sorted(
        {**other, **one}, key=lambda name: (name == ALL, -abs(other.get(name, 0.0) - one.get(name, 0.0)))
    )
    rows = [
        (
            name,
            *(f"{side[name]:,.{places}f}" if side.get(name) else "-" for side in (one, other)),
            *((change(other.get(name, 0.0) - one.get(name, 0.0), places),) if difference else ()),
        )
        for name in names
        if max(one.get(name, 0.0), other.get(name, 0.0)) >= 0.5 * 10**-places
    ]
    unit = "ms/step" if first.steps and second.steps else "ms"
    return Table(
        (unit, *labels(first.file, second.file), *(("difference",) if difference else ())), tuple(rows)
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


def _basis(steps: Sequence[TracedStep]) -> str:
    """Say how the times were taken, and what is not in them."""
    sentences = [
        "Measured by torch's profiler, whose own cost on the host is in the idle time. Every instant has one "
        "owner, so that the parts add up."
    ]
    names = labels(steps[0].file, steps[-1].file) if len(steps) > 1 else ("",)
    for label, step in zip(names, steps, strict=True):
        name = f" in {label}" if label else ""
        if step.marked_by == "optimizer":
            sentences.append(f"Steps{name} end with Optimizer.step, of the class that steps most often.")
        if step.with_stack:
            sentences.append(f"Stacks were recorded{name}, which slows the host most.")
        if step.compiled:
            sentences.append(f"torch.compile was at work{name}: this is no step as the job repeats it.")
        elif step.compiling_steps:
            steps_ = plural(step.compiling_steps, "step")
            sentences.append(f"{steps_}{name} in which torch.compile was at work left out.")
        if step.outside_ms >= 0.5 * 10 ** -digits(step.step_ms):
            sentences.append(f"{step.outside_ms:,.1f} ms of GPU work{name} outside the steps left out.")
        if not step.steps:
            sentences.append(
                f"Nothing marks steps{name}: call profiler.step() behind each one for times of a step."
            )
    return " ".join(sentences)
