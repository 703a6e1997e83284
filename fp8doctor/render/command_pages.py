"""The pages of the commands ``trace``, ``health``, ``compare``, ``why`` and ``plan``."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8doctor.answer.job import job_facts, model, quantity
from fp8doctor.answer.layer_rows import LayerReport, layer_shape, runs_in
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.traces import IDLE, Traces, shown
from fp8doctor.diagnosis.two_reports import Comparison
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.trial import TracedStep
from fp8doctor.health.record import OPERANDS, Health
from fp8doctor.health.verdict import HealthVerdict
from fp8doctor.planning.estimates import Row
from fp8doctor.planning.plan_document import PlanDocument, Setup
from fp8doctor.render.page import Code, Heatmap, Page, Part, Quiet, Strong, Table, labelled, number
from fp8doctor.version import VERSION
from fp8doctor.wording import percent, plural

WORK: dict[str, str] = {
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


def trace_page(document: Traces, *, verbose: bool = False) -> Page:
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
    return Page(
        (f"fp8doctor {document.tool.version}", *_traced(step)), (*parts, *hints, Quiet(_basis_of_trace(step)))
    )


def _traced(step: TracedStep) -> Iterator[str]:
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
    parts = {WORK[family]: ms for family, ms in step.families_ms.items()}
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
            WORK[each.family],
            f"{each.count:,.1f}".removesuffix(".0"),
            shown(each.time_ms),
            each.name or "(without a name)",
        )
        for each in kernels
    )
    return Table(("work" if verbose else "work (-v shows all)", "count", "ms"), rows, "kernel")


def _basis_of_trace(step: TracedStep) -> str:
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


LIMITS_DB = (20.0, 15.0, 10.0, 5.0)
"""Ratios below which the map gets darker. Sound E5M2 tensors have about 26 dB, E4M3 32."""

COLUMNS, ROWS, WORST = 48, 24, 5
"""Largest size of the map without ``-v``: a column is the worst of its samples, and the worst layers are
shown; rows of the table."""


def health_page(health: Health, verdict: HealthVerdict, *, verbose: bool = False) -> Page:
    """Lay out one run; ``verbose`` shows all layers."""
    header = health.headers[-1]
    heading = (f"fp8doctor {VERSION}", health.name, header.script, header.device or "")
    by_layer = health.lowest_db()
    worst = sorted(by_layer, key=lambda name: min(by_layer[name].values()))
    parts: list[Part] = [Strong(verdict.summary)]
    for each in verdict.conclusions:
        parts += [each.text, Code(each.code)]
    if by_layer:
        parts += [*_map(health, by_layer, set(by_layer if verbose else worst[:ROWS])), _last(health, worst)]
    return Page(heading, (*parts, Quiet(" ".join(_basis_of_health(health)))))


def _map(health: Health, by_layer: dict[str, dict[int, float]], kept: set[str]) -> Iterator[Part]:
    """Draw the lowest ratio of each layer over time."""
    size = -(-len(health.steps) // COLUMNS)
    columns = [health.steps[at : at + size] for at in range(0, len(health.steps), size)]
    rows = [
        (name, tuple(min((by[step] for step in each if step in by), default=None) for each in columns))
        for name, by in by_layer.items()
        if name in kept
    ]
    steps = (*(column[0] for column in columns[:-1]), health.steps[-1])
    yield Heatmap(
        "signal to rounding error", tuple(f"step {each:,}" for each in steps), tuple(rows), LIMITS_DB
    )
    hidden = len(by_layer) - len(kept)
    left = f" {plural(hidden, 'sounder layer')} left out (-v)." if hidden else ""
    yield f"The lowest of input, weight and gradient: ░ below 20 dB, ▒ 15, ▓ 10, █ 5.{left}"


def _last(health: Health, worst: Sequence[str]) -> Table:
    series = health.series()
    rows = []
    for name in worst[:WORST]:
        last = [series[name, each][-1][1] if (name, each) in series else None for each in OPERANDS]
        flushed = max((cast.flushed_pct or 0.0 for cast in last if cast is not None), default=0.0)
        rows.append(
            (name, *(number(None if cast is None else cast.lowest_db) for cast in last), percent(flushed))
        )
    return Table(("last sample", *(f"{each} dB" for each in OPERANDS), "flushed"), tuple(rows))


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _basis_of_health(health: Health) -> Iterator[str]:
    """Say what was sampled, what it cost, and what is unknown."""
    samples = [sample for _, sample in health.samples]
    yield f"{plural(len(samples), 'step')} sampled, on the job's own tensors."
    if samples:
        first, last = samples[0], samples[-1]
        one, other = (f"{_loss(each.loss)} ({_loss(each.gradient_norm)})" for each in (first, last))
        yield f"Loss (gradient norm): {one} at step {first.step:,}, {other} at {last.step:,}."
        cost_ms = sum(each.cost_ms or 0.0 for each in samples)
        time_ms = (last.step_ms or 0.0) * max(1, last.step - health.headers[0].step)
        if cost_ms and time_ms:
            yield f"Samples took {percent(100 * cost_ms / time_ms)} of the time (measured)."
    if restarts := len(health.headers) - 1:
        yield f"The job was restarted {plural(restarts, 'time')}."
    for why, count in Counter(layer.unseen for layer in health.layers.values() if layer.unseen).items():
        yield f"Input and gradient of {plural(count, 'layer')} are unknown: {why}."
    notes = dict.fromkeys(note for each in samples for note in each.notes)
    yield from (f"{note[:1].upper()}{note[1:]}." for note in list(notes)[:WORST])


def compare_page(found: Comparison, documents: tuple[Document, Document]) -> Page:
    one, other = found.steps
    jobs = [job_facts(each.facts, None) for each in documents]
    told = [
        (model(each.facts), *(f"{label}: {text}" for label, text in job))
        for each, job in zip(documents, jobs, strict=True)
    ]
    parts: tuple[Part, ...] = (
        Strong(found.summary),
        _table(found),
        "" if found.difference else "What the difference is made of is not known.",
        *(
            f"Differs: {each.what}: {each.first} ({one.name}), {each.second} ({other.name})."
            for each in found.unlike
        ),
        *(f"Beware: {caution}." for caution in found.cautions),
        f"{one.name}: {' · '.join(filter(None, told[0]))}",
        f"{other.name}: {' · '.join(filter(None, told[1]))}",
        f"Found only in {other.name}: {', '.join(found.appeared)}." if found.appeared else "",
        f"Found only in {one.name}: {', '.join(found.gone)}." if found.gone else "",
        Quiet(_basis_of_two(found)),
    )
    files = (
        f"{step.name}: {file}"
        for step, file in zip(found.steps, found.files, strict=True)
        if step.name != file
    )
    return Page((f"fp8doctor {found.tool.version}", f"{other.name} against {one.name}", *files), parts)


def _table(found: Comparison) -> Table:
    one, other = found.steps
    ends = [(step.low_ms, step.high_ms) for step in found.steps]
    spreads = [f" ± {(high - low) / 2:,.1f}" if low and high else "" for low, high in ends]
    ms = _both(one.step_ms, other.step_ms, 1, *spreads)
    rows = (
        ("ms/step", *ms),
        ("ms/step, estimated", *_both(one.estimated_ms, other.estimated_ms, 1)),
        ("tokens/s", *_both(one.tokens_per_s, other.tokens_per_s, 0)),
        ("peak memory, GiB", *_both(one.peak_gib, other.peak_gib, 1)),
    )
    shown = tuple(row for row in rows if any(cell != "-" for cell in row[1:3]))
    return Table(("", one.name, other.name, "ratio"), shown or rows[:1])


def _both(
    one: float | None, other: float | None, places: int, after: str = "", behind: str = ""
) -> tuple[str, str, str]:
    """Write two numbers and their ratio, of the numbers as they are shown."""
    both = ((one, after), (other, behind))
    cells = [number(value, places) + spread for value, spread in both]
    below, above = round(one or 0.0, places), round(other or 0.0, places)
    return cells[0], cells[1], f"{above / below:.2f}x" if above and below else ""


def _basis_of_two(found: Comparison) -> str:
    """Say how the times were taken; empty without any."""
    told = [f"{step.name} measured on {step.measured_on}" for step in found.steps if step.step_ms]
    apart = (
        "± is half of the interval that holds the time in a script with 90% confidence. The two were timed "
        "apart, so that clocks and heat may differ too."
    )
    return f"Times: {'; '.join(told)}; {apart}" if told else ""


def why_page(layer: LayerReport, facts: Facts) -> Page:
    rows = labelled((label, "; ".join(told)) for label, told in _known(layer, facts))
    return Page((f"fp8doctor {layer.tool.version}", layer.seen.name), (rows,))


def _known(layer: LayerReport, facts: Facts) -> Iterator[tuple[str, list[str]]]:
    linear = layer.seen
    seen = [linear.kind, layer_shape(linear), f"runs in {runs_in(linear, facts)}"]
    seen += [f"{layer.rows:,} rows a call"] if layer.rows else []
    for what in ("compiled", "checkpointed"):
        if recorded(linear, what):
            by = linear.get(what)
            seen.append(f"not {what}" if by is None else f"{what} with {by or 'the whole model'}")
    yield "Seen", seen + [f"{name}={value}" for name, value in linear.get("features", {}).items()]
    if layer.gain_ms is not None:
        saves = f"{'saves' if layer.gain_ms > 0 else 'costs'} {abs(layer.gain_ms):.3f} ms/step in this layer"
        yield "FP8", [f"{saves}, estimated, compiled"]
    kept = ["the plan keeps this layer in BF16"] if layer.keep_in_bf16 else []
    yield "Advised", [*layer.advised, *kept] or ["nothing"]


HEADS = ("recipe", "ms/step", "tokens/s", "speedup", "range", "GiB", "max batch")

BASIS_OF_PLAN = (
    "Estimated: nothing was run. tokens/s and GiB are of one GPU, which is full at 95%; max batch is what "
    "fits with this recipe; the last column has the largest part that FP8 does not speed up. "
    "docs/plan.md says what the estimates rest on."
)


def plan_page(plan: PlanDocument, *, framework: str | None = None) -> Page:
    heading = (
        f"fp8doctor {plan.tool['version']}",
        f"plan for {plan.name}",
        f"{plan.model}, {quantity(plan.parameters)} parameters",
        *_job_of_plan(plan),
    )
    parts: list[Part] = [Strong(plan.answer)]
    for gpu in dict.fromkeys(each.gpu for each in plan.rows):
        parts += _of_gpu([each for each in plan.rows if each.gpu == gpu], plan.options.gpus)
    parts += [*_legend(plan.rows), *plan.notes, *_set_up(plan.setups, framework), Quiet(BASIS_OF_PLAN)]
    return Page(heading, tuple(parts))


def _job_of_plan(plan: PlanDocument) -> Iterator[str]:
    options = plan.options
    sides = [
        f"{name} {size}" for name in ("dp", "tp", "cp", "pp", "ep") if (size := getattr(options, name)) > 1
    ]
    told = {
        f"{options.batch} x {options.seq:,} tokens": True,
        f"{', '.join(sides)}: {options.gpus} GPUs": options.gpus > 1,
        options.sharding: options.ranks > 1,
        f"{options.accumulate} micro-batches": options.accumulate > 1,
        f"{options.checkpointing} checkpointing": options.checkpointing != "none",
        "fused loss": options.fused_loss,
        f"LoRA rank {options.lora}": options.lora,
        options.optimizer: True,
    }
    return (each for each, holds in told.items() if holds)


def _of_gpu(found: Sequence[Row], gpus: int) -> Iterator[Part]:
    """Lay out the rows of one GPU, and what has no estimate."""
    first = found[0]
    of_stacks = list({each.stack: each for each in found}.values())
    apart = len({each.bf16_step_ms for each in of_stacks}) > 1
    shown = [each for each in found if not each.why]
    yield Strong(f"{f'{gpus} x ' if gpus > 1 else ''}{first.gpu}, {first.gpu_memory_gib:g} GiB")
    rows = [
        _cells("te BF16" if apart and each.stack == "te" else "BF16", each, "bf16_")
        for each in (of_stacks if apart else of_stacks[:1])
    ]
    rows += [_cells(each.name, each) for each in shown]
    yield Table(HEADS, tuple(rows), "besides matmuls")
    for why in dict.fromkeys(each.why for each in found if each.why):
        names = ", ".join(each.name for each in found if each.why == why)
        yield f"No estimate for {first.gpu}: {names} ({why})."


def _cells(name: str, row: Row, of: str = "") -> tuple[str, ...]:
    """Lay out FP8 of a row, or BF16 with the fields that ``of`` begins."""
    fields = ("step_ms", "tokens_per_s", "memory_gib", "largest_batch", "limits")
    ms, tokens, gib, batch, limits = (getattr(row, of + field) for field in fields)
    speedup, between = ("", "") if of else ("-", "-")
    if row.speedup and not of:
        speedup, between = f"{row.speedup:.2f}x", f"{row.speedup_low:.2f}-{row.speedup_high:.2f}"
    fits = f"{batch:,}" if batch else "none fits"
    return name, number(ms), number(tokens, 0), speedup, between, number(gib), fits, "".join(limits[:1])


def _legend(found: Sequence[Row]) -> Iterator[str]:
    """Explain the recipes whose names say nothing to somebody new to them."""
    shown = [each for each in found if not each.why]
    told = {each.recipe: each.of.words for each in shown}
    named = [f"{name} is {words}" for name, words in told.items() if words and name not in words.lower()]
    if any(each.stack == "te" for each in shown):
        named.insert(0, "te is Transformer Engine, which needs a model of its own layers")
    if named:
        yield f"{'; '.join(named)}."


def _set_up(setups: Sequence[Setup], framework: str | None) -> Iterator[Code | str]:
    """Show the lines of a framework, by default of the first of each stack, and name the others."""
    first = list({each.stack: each for each in reversed(setups)}.values())[::-1]
    shown = [each for each in setups if each.framework == framework] if framework else first
    for each in shown:
        yield f"Set up {each.recipe}, {each.framework}:"
        yield Code(each.code)
    if setups and not shown:
        yield f"{framework} has no setting for {' or '.join(dict.fromkeys(each.recipe for each in setups))}."
    if others := dict.fromkeys(each.framework for each in setups if each not in shown):
        yield f"For other frameworks: --framework {', '.join(others)}."
