"""A plan as a page: a table for each GPU, then the answer."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.planning.document import PlanDocument, words
from fp8doctor.planning.rows import Row
from fp8doctor.render.header import quantity
from fp8doctor.render.table_page import Sheet, Table

HEADS = ("recipe", "ms/step", "tokens/s per GPU", "speedup", "range", "GiB", "largest batch")


def page(plan: PlanDocument) -> Sheet:
    """Lay out a plan."""
    options = plan.options
    heading = (
        f"fp8doctor {plan.tool['version']}",
        f"plan for {plan.name}",
        f"{plan.model}, {quantity(plan.parameters)} parameters",
        *_job(plan),
    )
    parts: list[Table | str] = []
    for gpu in dict.fromkeys(each.gpu for each in plan.rows):
        found = [each for each in plan.rows if each.gpu == gpu]
        parts += _of_gpu(found, options.gpus)
    parts += plan.notes
    parts.append(plan.answer)
    return Sheet(heading, (), tuple(parts), "")


def _job(plan: PlanDocument) -> Iterator[str]:
    options = plan.options
    yield f"{options.batch} x {options.seq:,} tokens"
    sides = [f"{name} {size}" for name in ("dp", "tp", "cp", "pp") if (size := getattr(options, name)) > 1]
    if sides:
        yield f"{' x '.join(sides)} = {options.gpus} GPUs" + (
            f", {options.sharding}" if options.dp > 1 else ""
        )
    if options.accumulate > 1:
        yield f"{options.accumulate} micro-batches"
    if options.checkpointing != "none":
        yield f"checkpointing {options.checkpointing}"
    if options.lora:
        yield f"LoRA {options.lora}"
    yield options.optimizer


def _of_gpu(found: list[Row], gpus: int) -> Iterator[Table | str]:
    """Lay out the rows of one GPU; uncompiled ones only if nothing else has times."""
    first = found[0]
    shown = [each for each in found if each.step_ms is not None and each.compiled]
    rows: list[tuple[str, ...]] = [
        (
            "BF16",
            _number(first.bf16_step_ms, 1),
            _number(first.bf16_tokens_per_s, 0),
            "",
            "",
            _memory(first.bf16_memory_gib, first.bf16_fits),
            "",
            _limits(first.bf16_limits),
        )
    ]
    rows += [_row(each) for each in shown]
    yield (
        f"{gpus} x {first.gpu} ({first.gpu_memory_gib:g} GiB)"
        if gpus > 1
        else f"{first.gpu} ({first.gpu_memory_gib:g} GiB)"
    )
    yield Table(HEADS, tuple(rows), "limits")
    without: dict[str, list[str]] = {}
    for row in found:
        if row.why and row.bf16_step_ms is not None:
            without.setdefault(row.why, []).append(words(row))
    if without:
        yield (
            "No estimate: " + "; ".join(f"{', '.join(names)}: {why}" for why, names in without.items()) + "."
        )


def _row(row: Row) -> tuple[str, ...]:
    return (
        words(row),
        _number(row.step_ms, 1),
        _number(row.tokens_per_s, 0),
        f"{row.speedup:.2f}x",
        f"{row.speedup_low:.2f} to {row.speedup_high:.2f}",
        _memory(row.memory_gib, row.fits is not False),
        str(row.largest_batch),
        _limits(row.limits),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _memory(gib: float | None, fits: bool) -> str:
    return "-" if gib is None else f"{gib:.1f}" if fits else f"{gib:.1f} (too much)"


def _limits(parts: tuple[str, ...]) -> str:
    return ", ".join(parts)
