"""The report as an HTML file, and as a fragment for a notebook, which has no script."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, recorded
from fp8doctor.render import charts
from fp8doctor.render.charts import Chart, Evidence, evidence
from fp8doctor.render.detail_tables import (
    LayerTable,
    layer_table,
)
from fp8doctor.render.details import Details, Entry, details
from fp8doctor.render.environment_page import for_support, variables
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.templates import fill
from fp8doctor.render.words import NOT_PROFILED, Mark

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
    """All that a page shows: the first screen, the details, and parts for a page only."""

    title: str
    screen: Screen
    more: Details
    fixes: tuple[Entry, ...]
    others: tuple[Entry, ...]
    steps: Chart | None
    differences: tuple[Chart, ...]
    evidence: Evidence | None
    layers: LayerTable | None
    unknown: tuple[str, ...]
    """Checks that had no answer, besides what was not looked at."""
    answered: tuple[str, ...]
    """Checks that found nothing."""
    environment: tuple[str, ...]


def render(report: Document) -> str:
    """Write the report as a page; nothing from a user or machine is read as HTML."""
    return _filled("page.html.jinja", report)


def fragment(report: Document) -> str:
    """Write the report as a piece of HTML that changes nothing around it."""
    return _filled("fragment.html.jinja", report)


def _filled(template: str, report: Document) -> str:
    return fill(template, view=view(report), words=WORDS, not_profiled=NOT_PROFILED)


def view(report: Document) -> View:
    """Collect what a page shows."""
    screen, more, facts = first_screen(report), details(report), report.facts
    return View(
        title=f"fp8doctor: {_name(facts)}",
        screen=screen,
        more=more,
        fixes=tuple(each for each in more.entries if each.number),
        others=tuple(each for each in more.entries if not each.number),
        steps=charts.steps(more.timing),
        differences=charts.differences(more.timing),
        evidence=evidence(more.timing, report.verdict),
        layers=layer_table(facts),
        unknown=tuple(_unknown(more)),
        answered=tuple(line.text for line in more.outcomes if line.mark != "unknown"),
        environment=(*more.counts, *_environment(facts)),
    )


def _unknown(more: Details) -> Iterator[str]:
    """Name the checks without an answer that are not among what was not looked at."""
    for line in more.outcomes:
        if line.mark == "unknown" and not more.unanswered.issuperset(line.codes):
            yield line.text


def _name(facts: Facts) -> str:
    named = facts.get("target.name")
    return named or "the environment"


def _environment(facts: Facts) -> Iterator[str]:
    yield from for_support(facts)
    for name, package in facts.packages().items() if recorded(facts, "software") else ():
        version = package.get("version")
        yield f"{name} {version or 'of unknown version'}"
    yield from variables(facts)
