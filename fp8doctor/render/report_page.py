"""A report as a page: the first screen, and the details that ``-v``, Markdown and HTML add to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8doctor.answer.commands import more_time
from fp8doctor.answer.items import Item, area_marks, areas, without_findings
from fp8doctor.answer.job import ROWS, TOKENS, UNKNOWN, job_facts, machine, made_up, model
from fp8doctor.answer.layer_rows import HEADS, LEGEND, layer_rows
from fp8doctor.answer.machine import no_model, says, support, things, variables
from fp8doctor.answer.sentences import box, in_short
from fp8doctor.answer.steps import ranks
from fp8doctor.diagnosis.document import Document
from fp8doctor.render.page import (
    Bars,
    Code,
    Marked,
    Marks,
    Next,
    Page,
    Part,
    Quiet,
    Section,
    Strong,
    Table,
    labelled,
    side_by_side,
)
from fp8doctor.wording import plural

LONG = 80
"""Characters of a command that a box of 100 columns breaks. A choice."""

BARE, BELOW = ("FP8", "attention"), ("Memory", TOKENS, ROWS)
"""Facts of the job that need no label, and those that stand below the table of steps."""

ONLY = "Environment only. Run `fp8doctor model.py` to check a model."


def page(report: Document, *, quiet: bool = False, held_in: str = "") -> Page:
    """Lay a report out; only its warnings if ``quiet``. ``held_in`` names Python's variable of the report."""
    if no_model(report):
        return _environment(report, quiet=quiet)
    if quiet:
        return Page((), (box(report.answer), *_notices(report, notes=False)))
    name = model(report.facts)
    heading = (f"fp8doctor {report.tool.version}", *([name] if name else []))
    title = f"fp8doctor: {report.facts.get('target.name') or 'the environment'}"
    return Page(heading, tuple(_first(report, held_in)), tuple(_details(report)), title)


def _first(report: Document, held_in: str) -> Iterator[Part]:
    facts, said = report.facts, report.answer
    told = job_facts(facts, report.verdict.tokens_per_s, report.findings)
    bare = {label for label, each in told if label in BARE and each != UNKNOWN}
    job = (each if label in bare else f"{label} {each}" for label, each in told if label not in BELOW)
    yield side_by_side((*machine(facts, report.modelled_gpu), *job))
    yield box(said)
    if said.fault and in_short(said.fault.reason) != said.fault.reason.rstrip("."):
        yield f"{said.fault.reason[:1].upper()}{said.fault.reason[1:]}"
    if fixes := [each for each in said.items if each.number]:
        yield Marks(
            tuple(Marked(None, each.aside, f"Fix {each.number}", each.code, each.lines) for each in fixes)
        )
    if steps := said.steps:
        if steps.rows:
            yield Bars(steps.rows)
        yield from (Quiet(each) for each in (steps.method, steps.untimed) if each)
    if below := tuple(each for each in told if each[0] in BELOW):
        yield labelled(below)
    if found := ranks(facts):
        yield found[0]
        yield labelled(found[1])
    yield from _notices(report)
    if counted := tuple(areas(area_marks(report.outcomes, report.findings, said.status, facts))):
        yield Marks(counted, in_a_line=True)
    if apart := made_up(facts):
        yield Quiet(apart)
    if report.ignored:
        yield Quiet(f"Ignored: {'; '.join(f'{code} ({reason})' for code, reason in report.ignored.items())}")
    yield from _next(report, held_in)


def _notices(report: Document, *, notes: bool = True) -> Iterator[Marks]:
    """List the findings next to the plan, and in one line what is only information."""
    said = report.answer
    lines = [
        Marked(each.mark, f"{each.title}{f' ({each.aside})' if each.aside else ''}", code=each.code)
        for each in said.notices
        if notes or each.mark != "info"
    ]
    for outcome in report.outcomes:
        if outcome.outcome == "crashed":
            why = f"check {outcome.code} crashed: {outcome.reason or 'no reason given'}"
            lines.append(Marked("unknown", why, code=outcome.code))
    mended = {name for step in said.fixes for name in step.names}
    infos = [each for each in said.items if each.is_note and each.name not in mended] if notes else []
    if infos:
        titles = "; ".join(f"{each.title.rstrip('.')} ({each.code})" for each in infos)
        lines.append(Marked("info", f"{plural(len(infos), 'note')}: {titles}"))
    if lines:
        yield Marks(tuple(lines))


def _next(report: Document, held_in: str) -> Iterator[Part]:
    """Name the next commands, for a shell or for Python, and the page of a code that is shown."""
    said = report.answer
    codes = [each.code for each in said.items if each.number] + [each.code for each in said.notices]
    first = next(filter(None, codes), "")
    option = "" if said.is_decided else more_time(report.facts)
    pieces = [f'{held_in}.save("report.json")'] if held_in else []
    if first in {each.code for each in report.findings if each.severity != "info"}:
        pieces.append(f"fp8doctor explain {first}")
    if option:
        pieces.append(f"{option} to time more variants")
    pieces += (
        ["in a shell: fp8doctor report -v report.json"] if held_in else ["-v shows more", "-o report.html"]
    )
    yield Next(tuple(pieces), said.command if len(said.command) > LONG else "")


def _details(report: Document) -> Iterator[Section]:
    """Add what the first screen does not say."""
    facts = report.facts
    if steps := report.answer.steps:
        numbers = Bars(steps.rows).numbers
        proofs = Table(
            ("variant",), tuple((each.label, each.rounds) for each in steps.rows if each.rounds), "in"
        )
        parts = (numbers, *steps.differences, *steps.notes, *([proofs] if proofs.rows else []))
        yield Section("The steps in numbers", tuple(each for each in parts if each))
    if explained := tuple(_explained(report.answer.items)):
        yield Section("What was found", explained)
    if rows := layer_rows(facts.linears(), facts):
        yield Section("Layer by layer", (Table(HEADS, rows, "runs in"), Quiet(LEGEND)), is_folded=True)
    lines = (*_unread(report), *without_findings(report.outcomes))
    if lines:
        yield Section("Checks without a finding", (Marks(lines),), is_folded=True)
    recorded = (
        f"Recorded {report.created_at} by fp8doctor {report.tool.version}." if report.created_at else ""
    )
    yield Section(
        "Environment",
        (side_by_side((*support(facts), *variables(facts))), *([Quiet(recorded)] if recorded else [])),
        is_folded=True,
    )


def _explained(items: Iterable[Item]) -> Iterator[Part]:
    """Explain each fix and finding; the first screen has its title, and the lines of a fix."""
    for each in items:
        if each.explanation or each.summary:
            yield Strong(f"{each.code} {each.name}".strip(), each.mark)
        if each.explanation:
            yield each.explanation
        if each.summary and each.number is None:
            yield f"Would change it: {each.summary}."
            if each.lines:
                yield Code(each.lines)


def _unread(report: Document) -> Iterator[Marked]:
    """List facts that could not be read or timed, with the reason."""
    for name, reason in report.facts.get("gaps", {}).items():
        yield Marked("unknown", f"Not read: {name}: {reason}")


def _environment(report: Document, *, quiet: bool) -> Page:
    """Lay out whether the machine can train in FP8, and what is there, a line each."""
    mark, verdict = says(report)
    found = tuple(things(report, quiet=quiet))
    shown = {word for each in found for word in each.text.split()}
    more = side_by_side(each for each in support(report.facts) if each.split()[-1] not in shown)
    checked = Marks((*_unread(report), *without_findings(report.outcomes)))
    return Page(
        (f"fp8doctor {report.tool.version}",),
        (Strong(verdict, mark), Marks(found), *(() if quiet else (ONLY,))),
        (Section("Machine", (more,)), Section("Checks without a finding", (checked,))),
    )
