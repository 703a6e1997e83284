"""The report as one HTML file for a browser, and as a fragment for a notebook: no script, no network."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.render import charts
from fp8doctor.render.answer import Answer, answer
from fp8doctor.render.charts import Chart
from fp8doctor.render.evidence import Evidence, evidence
from fp8doctor.render.layer_groups import LayerTable, layer_table
from fp8doctor.render.ledger import HEADS, LedgerTable, ledger_table
from fp8doctor.render.loss_chart import LossChart, loss_chart
from fp8doctor.render.marks import Mark
from fp8doctor.render.rates import RateTable, rate_table
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.support import for_support, not_timed, variables
from fp8doctor.render.templates import fill
from fp8doctor.render.timing import Timing
from fp8doctor.render.words import NOT_PROFILED, plainly

WORDS: dict[Mark, str] = {
    "bad": "Serious",
    "warning": "Warning",
    "info": "Note",
    "healthy": "Fine",
    "not_applicable": "Does not apply",
    "unknown": "Not known",
}
"""The marks of the text screen, in words."""


class View(Struct, frozen=True):
    """All that a page shows."""

    title: str
    heading: tuple[str, ...]
    """This program, the GPU, the versions and the model, a few words each."""
    answer: Answer
    screen: Screen
    timing: Timing | None
    steps: Chart | None
    differences: tuple[Chart, ...]
    evidence: Evidence | None
    layers: LayerTable | None
    ledger: LedgerTable | None
    rates: RateTable | None
    loss: LossChart | None
    findings: dict[str, Finding]
    """By their codes."""
    titles: dict[str, str]
    """Those of the findings in a user's words, by their codes."""
    calm: tuple[tuple[str, tuple[str, ...]], ...]
    """The areas without trouble, by what is known of them."""
    unknown: tuple[str, ...]
    """Checks that had no answer, besides what was not looked at."""
    gaps: tuple[str, ...]
    """What could not be read or timed."""
    answered: tuple[str, ...]
    """Checks that found nothing."""
    environment: tuple[str, ...]
    recorded: str
    """When, and by which version."""


def render(report: Document) -> str:
    """Write the report as a page. Nothing that came from a user's model or machine is read as HTML."""
    return _filled("page.html.jinja", report)


def fragment(report: Document) -> str:
    """Write the report as a piece of HTML that changes nothing around it."""
    return _filled("fragment.html.jinja", report)


def _filled(template: str, report: Document) -> str:
    return fill(template, view=view(report), words=WORDS, not_profiled=NOT_PROFILED, gemm_heads=HEADS)


def view(report: Document) -> View:
    """Collect what a page shows."""
    screen = first_screen(report, whole=True)
    facts, timing = report.facts, screen.timing
    fp8 = bool(if_recorded(uses_fp8, facts))
    return View(
        title=f"fp8doctor: {_name(facts)}",
        heading=tuple(filter(None, (*screen.machine, screen.model))),
        answer=answer(report),
        screen=screen,
        timing=timing,
        steps=charts.steps(timing),
        differences=charts.differences(timing),
        evidence=evidence(timing, report.verdict),
        layers=layer_table(facts),
        ledger=ledger_table(report.ledger, screen.labels) if report.ledger else None,
        rates=rate_table(report.rates, fp8, screen.labels) if report.rates else None,
        loss=if_recorded(loss_chart, facts),
        findings={each.code: each for each in report.findings},
        titles={each.code: plainly(each.title) for each in report.findings},
        calm=tuple(_calm(screen)),
        unknown=tuple(_unknown(screen)),
        gaps=(*_gaps(facts), *not_timed(facts)),
        answered=tuple(line.text for line in screen.outcomes if line.mark != "unknown"),
        environment=tuple(_environment(report, screen)),
        recorded=f"Recorded {report.created_at or 'at an unknown time'} by fp8doctor {report.tool.version}.",
    )


def _unknown(screen: Screen) -> Iterator[str]:
    """Name the checks without an answer that are not among what was not looked at."""
    for line in screen.outcomes:
        if line.mark == "unknown" and not screen.unanswered.issuperset(line.codes):
            yield line.text


def _name(facts: Facts) -> str:
    named = recorded(facts, "target.name") and facts.target.name
    return named or "the environment"


def _calm(screen: Screen) -> Iterator[tuple[str, tuple[str, ...]]]:
    for mark, word in WORDS.items():
        if areas := tuple(line.area for line in screen.areas if line.mark == mark):
            yield word, areas


def _gaps(facts: Facts) -> Iterator[str]:
    gaps = facts.gaps if recorded(facts, "gaps") else {}
    yield from (f"Not read: {name}: {reason}" for name, reason in gaps.items())


def _environment(report: Document, screen: Screen) -> Iterator[str]:
    facts = report.facts
    yield from screen.machine[1:]
    yield from for_support(facts)
    for name, package in facts.packages().items() if recorded(facts, "software") else ():
        version = package.version if recorded(package, "version") else None
        yield f"{name} {version or 'of unknown version'}"
    yield from variables(facts)
