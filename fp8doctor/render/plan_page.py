"""A plan as a page: the answer, a table for each GPU, and the set-up."""

from collections.abc import Iterator, Sequence

from fp8doctor.answer.job import quantity
from fp8doctor.planning.estimates import Row
from fp8doctor.planning.plan_document import PlanDocument, Setup
from fp8doctor.render.page import Code, Page, Part, Quiet, Strong, Table, number

HEADS = ("recipe", "ms/step", "tokens/s", "speedup", "range", "GiB", "max batch")

BASIS = (
    "Estimated: nothing was run. tokens/s and GiB are of one GPU, which is full at 95%; max batch is what "
    "fits with this recipe; the last column has the largest part that FP8 does not speed up. "
    "docs/plan.md says what the estimates rest on."
)


def page(plan: PlanDocument, *, framework: str | None = None) -> Page:
    heading = (
        f"fp8doctor {plan.tool['version']}",
        f"plan for {plan.name}",
        f"{plan.model}, {quantity(plan.parameters)} parameters",
        *_job(plan),
    )
    parts: list[Part] = [Strong(plan.answer)]
    for gpu in dict.fromkeys(each.gpu for each in plan.rows):
        parts += _of_gpu([each for each in plan.rows if each.gpu == gpu], plan.options.gpus)
    parts += [*_legend(plan.rows), *plan.notes, *_setup(plan.setups, framework), Quiet(BASIS)]
    return Page(heading, tuple(parts))


def _job(plan: PlanDocument) -> Iterator[str]:
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


def _setup(setups: Sequence[Setup], framework: str | None) -> Iterator[Code | str]:
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
