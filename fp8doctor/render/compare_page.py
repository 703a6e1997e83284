"""Two saved reports as a page: the table that people make by hand."""

from fp8doctor.answer.job import job_facts, model
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.two_reports import Comparison
from fp8doctor.render.page import Page, Part, Quiet, Strong, Table, number


def page(found: Comparison, documents: tuple[Document, Document]) -> Page:
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
        Quiet(_basis(found)),
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


def _basis(found: Comparison) -> str:
    """Say how the times were taken; empty without any."""
    told = [f"{step.name} measured on {step.measured_on}" for step in found.steps if step.step_ms]
    apart = (
        "± is half of the interval that holds the time in a script with 90% confidence. The two were timed "
        "apart, so that clocks and heat may differ too."
    )
    return f"Times: {'; '.join(told)}; {apart}" if told else ""
