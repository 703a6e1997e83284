"""Two saved reports as a page: the table that people make by hand."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.timed_step import TimedStep
from fp8doctor.diagnosis.comparison import Comparison
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts
from fp8doctor.render.header import job_facts, model
from fp8doctor.render.table_page import Sheet, Table
from fp8doctor.render.trace_page import FAMILIES, change

NONE_MS = 0.05
"""Time below which a part would be shown as 0.0 ms."""


def page(found: Comparison, documents: tuple[Document, Document]) -> Sheet:
    """Lay out the comparison of these reports."""
    one, other = found.steps
    parts: list[Table | str] = [_table(found)]
    if found.families_ms:
        parts.append(_families(found))
    elif found.why_no_difference:
        parts.append(f"What the difference is made of is not known: {found.why_no_difference}.")
    parts += [
        f"Differs: {each.what}: {each.first} ({one.name}), {each.second} ({other.name})."
        for each in found.unlike
    ]
    parts += [f"Beware: {caution}." for caution in found.cautions]
    parts += [
        f"{step.name}: {' · '.join(filter(None, (model(document.facts), *_job(document.facts))))}"
        for step, document in zip(found.steps, documents, strict=True)
    ]
    parts += list(_findings(found))
    named = zip(found.steps, found.files, strict=True)
    return Sheet(
        (
            f"fp8doctor {found.tool.version}",
            f"{other.name} against {one.name}",
            *(f"{step.name}: {file}" for step, file in named if step.name != file),
        ),
        (found.summary,),
        tuple(parts),
        _basis(one, other),
    )


def _table(found: Comparison) -> Table:
    one, other = found.steps
    rows = (
        (
            f"ms/step{' (CPU)' if one.on_cpu and other.on_cpu else ''}",
            _spread(one),
            _spread(other),
            _ratio(one.step_ms, other.step_ms, 1),
        ),
        ("steps/s", *_both(one.steps_per_s, other.steps_per_s, 2)),
        ("tokens/s", *_both(one.tokens_per_s, other.tokens_per_s, 0)),
        ("peak memory, GiB", *_both(one.peak_gib, other.peak_gib, 1)),
    )
    shown = tuple(row for row in rows if any(cell != "-" for cell in row[1:3]))
    return Table(("", one.name, other.name, "ratio"), shown or rows[:1])


def _spread(step: TimedStep) -> str:
    if step.step_ms is None:
        return "-"
    known = step.low_ms is not None and step.high_ms is not None
    spread = f" ± {((step.high_ms or 0.0) - (step.low_ms or 0.0)) / 2:,.1f}" if known else ""
    return f"{step.step_ms:,.1f}{spread}"


def _both(one: float | None, other: float | None, places: int) -> tuple[str, str, str]:
    cells = tuple("-" if value is None else f"{value:,.{places}f}" for value in (one, other))
    return cells[0], cells[1], _ratio(one, other, places)


def _ratio(one: float | None, other: float | None, places: int) -> str:
    """Divide the second by the first, as they are shown."""
    below, above = round(one or 0.0, places), round(other or 0.0, places)
    return f"{above / below:.2f}x" if above and below else ""


def _families(found: Comparison) -> Table:
    assert found.families_ms is not None
    assert found.difference is not None
    first, second = found.families_ms
    names = {**FAMILIES, "idle": "idle"}
    shown = sorted({**first, **second}, key=lambda each: -abs(second.get(each, 0.0) - first.get(each, 0.0)))
    rows = [
        (
            names[family],
            *(f"{ms:,.1f}" if ms >= NONE_MS else "-" for ms in both),
            change(both[1] - both[0], 1),
        )
        for family in shown
        if max(both := (first.get(family, 0.0), second.get(family, 0.0))) >= NONE_MS
    ]
    one, other = found.steps
    total = ("all", f"{one.step_ms:,.1f}", f"{other.step_ms:,.1f}", change(found.difference.difference_ms, 1))
    return Table(("ms/step", one.name, other.name, "difference"), (*rows, total))


def _job(facts: Facts) -> Iterator[str]:
    """Write what decides about FP8 in a job, in one line."""
    yield from (f"{label}: {told}" for label, told in job_facts(facts, None))


def _findings(found: Comparison) -> Iterator[str]:
    one, other = found.steps
    if found.appeared:
        yield f"Found only in {other.name}: {', '.join(found.appeared)}."
    if found.gone:
        yield f"Found only in {one.name}: {', '.join(found.gone)}."


def _basis(one: TimedStep, other: TimedStep) -> str:
    """Say how the times were taken."""
    told = []
    for step in (one, other):
        if step.step_ms:
            rounds = f" in {len(step.rounds_ms)} rounds" if step.rounds_ms else ""
            cut = ", predicted from cuts of the model" if step.predicted else ""
            told.append(f"{step.name} measured on {step.measured_on}{rounds}{cut}")
    if not told:
        return ""
    return (
        f"Times: {'; '.join(told)}; ± is half of the interval that holds the time in a script with 90% "
        "confidence. The two were timed apart, so that clocks and heat may differ too."
    )
