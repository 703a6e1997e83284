"""A report as a page: the first screen, and the details that ``-v``, Markdown and HTML add to it."""

from collections.abc import Iterable, Iterator

from fp8doctor.answer.items import Item, counted, without_findings
from fp8doctor.answer.job import (
    ROWS,
    TOKENS,
    UNKNOWN,
    job_facts,
    lacks_model,
    machine,
    machine_lines,
    machine_says,
    made_up,
    model,
    support,
    variables,
)
from fp8doctor.answer.layer_rows import HEADS, LEGEND, layer_rows
from fp8doctor.answer.open_questions import more_time
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
    if lacks_model(report):
        return _environment(report, quiet=quiet)
    if quiet:
        return Page((), (box(report.answer), _notices(report, notes=False)))
    heading = (f"fp8doctor {report.tool.version}", model(report.facts))
    title = f"fp8doctor: {report.facts.get('target.name') or 'the environment'}"
    return Page(heading, tuple(_first(report, held_in)), tuple(_details(report)), title)


def _first(report: Document, held_in: str) -> Iterator[Part]:
    facts, said = report.facts, report.answer
    told = job_facts(facts, report.verdict.tokens_per_s, report.findings)
    bare = {label for label, each in told if label in BARE and each != UNKNOWN}
    job = (each if label in bare else f"{label} {each}" for label, each in told if label not in BELOW)
    fault = said.fault.reason if said.fault else ""
    is_told = not said.fault or in_short(fault) == fault.rstrip(".")
    fixes = (
        Marked(None, each.aside, f"Fix {each.number}" if each.number else "Also", each.code, each.lines)
        for each in said.items
        if each.number or each.is_beside
    )
    steps, of_ranks = said.steps, ranks(facts)
    yield side_by_side((*machine(facts, report.modelled_gpu), *job))
    yield box(said)
    yield "" if is_told else f"{fault[:1].upper()}{fault[1:]}"
    yield Marks(tuple(fixes))
    if steps:
        yield from (Bars(steps.rows), Quiet(steps.method), Quiet(steps.untimed))
    yield labelled(each for each in told if each[0] in BELOW)
    if of_ranks:
        yield from (of_ranks[0], labelled(of_ranks[1]))
    yield _notices(report)
    yield side_by_side(counted(report.outcomes, facts))
    yield Quiet(made_up(facts))
    ignored = "; ".join(f"{code} ({reason})" for code, reason in report.ignored.items())
    yield Quiet(ignored and f"Ignored: {ignored}")
    yield _next(report, held_in)


def _notices(report: Document, *, notes: bool = True) -> Marks:
    """List the findings next to the plan, and in one line what is only information."""
    said = report.answer
    lines = [
        Marked(each.mark, f"{each.title}{f' ({each.aside})' if each.aside else ''}", code=each.code)
        for each in said.notices
        if notes or each.mark != "info"
    ]
    mended = {name for step in said.fixes for name in step.names}
    infos = [each for each in said.items if each.is_note and each.name not in mended]
    if infos and notes:
        titles = "; ".join(f"{each.title.rstrip('.')} ({each.code})" for each in infos)
        lines.append(Marked("info", f"{plural(len(infos), 'note')}: {titles}"))
    return Marks(tuple(lines))


def _next(report: Document, held_in: str) -> Next:
    """Name the next commands, for a shell or for Python, with the page of the first code that is shown.

    A cause whose code stands in no line gets its page too.
    """
    said = report.answer
    codes = [each.code for each in said.items if each.number] + [each.code for each in said.notices]
    of_causes = (each.code for each in said.causes if each.code not in codes)
    asked = dict.fromkeys((next(filter(None, codes), ""), *of_causes))
    option = "" if said.is_decided else more_time(report.facts)
    pieces = [f'{held_in}.save("report.json")'] if held_in else []
    grave = {each.code for each in report.findings if each.severity != "info"}
    if pages := " ".join(each for each in asked if each in grave):
        pieces.append(f"fp8doctor explain {pages}")
    if option:
        pieces.append(f"{option} to time more variants")
    elif said.times_it:
        pieces.append(f"{said.times_it} on a GPU to time it")
    pieces += (
        ["in a shell: fp8doctor report -v report.json"] if held_in else ["-v shows more", "-o report.html"]
    )
    return Next(tuple(pieces), said.command if len(said.command) > LONG else "")


def _details(report: Document) -> Iterator[Section]:
    facts = report.facts
    if steps := report.answer.steps:
        rounds = tuple((each.label, each.rounds) for each in steps.rows if each.rounds)
        numbers, proofs = Bars(steps.rows).numbers, Table(("variant",), rounds, "in")
        yield Section("The steps in numbers", (numbers, *steps.differences, *steps.notes, proofs))
    yield Section("What was found", tuple(_explained(report.answer.items)))
    if rows := layer_rows(facts.linears(), facts):
        yield Section("Layer by layer", (Table(HEADS, rows, "runs in"), Quiet(LEGEND)), is_folded=True)
    yield Section("Checks without a finding", (_without_findings(report),), is_folded=True)
    recorded = f"Recorded {report.created_at} by fp8doctor {report.tool.version}." * bool(report.created_at)
    machine = side_by_side((*support(facts), *variables(facts)))
    yield Section("Environment", (machine, Quiet(recorded)), is_folded=True)


def _explained(items: Iterable[Item]) -> Iterator[Part]:
    """Explain each fix and finding; the first screen has its title, and the lines of a fix."""
    for each in items:
        change = each.summary if each.number is None else ""
        if each.explanation or change:
            yield from (Strong(f"{each.code} {each.name}".strip(), each.mark), each.explanation)
        if change:
            yield f"Would change it: {change}."
            if each.lines:
                yield Code(each.lines)


def _without_findings(report: Document) -> Marks:
    gaps = report.facts.get("gaps", {}).items()
    unread = (Marked("unknown", f"Not read: {name}: {reason}") for name, reason in gaps)
    return Marks((*unread, *without_findings(report.outcomes)))


def _environment(report: Document, *, quiet: bool) -> Page:
    """Lay out whether the machine can train in FP8, and what is there, a line each."""
    mark, verdict = machine_says(report)
    found = tuple(machine_lines(report, quiet=quiet))
    shown = {word for each in found for word in each.text.split()}
    more = side_by_side(each for each in support(report.facts) if each.split()[-1] not in shown)
    return Page(
        (f"fp8doctor {report.tool.version}",),
        (Strong(verdict, mark), Marks(found), "" if quiet else ONLY),
        (Section("Machine", (more,)), Section("Checks without a finding", (_without_findings(report),))),
    )
