"""A page as an HTML file, and as a fragment for a notebook, which has no script."""

from __future__ import annotations

from fp8doctor.answer.items import Mark
from fp8doctor.diagnosis.document import Document
from fp8doctor.render import report_page
from fp8doctor.render.page import FAMILIES, Page
from fp8doctor.render.templates import fill

WORDS: dict[Mark, str] = {
    "bad": "Serious",
    "warning": "Warning",
    "info": "Note",
    "healthy": "Fine",
    "not_applicable": "Does not apply",
    "unknown": "Not known",
}
"""Marks in words."""


def render(report: Document) -> str:
    """Write the report as a page; nothing from a user or machine is read as HTML."""
    return as_html(report_page.page(report))


def fragment(report: Document) -> str:
    """Write the report as a piece of HTML that changes nothing around it."""
    return as_html(report_page.page(report), template="fragment.html.jinja")


def as_html(page: Page, *, template: str = "page.html.jinja") -> str:
    """Write a page, its folded details where a reader opens them."""
    return fill(template, page=page, title=page.title or page.heading[0], words=WORDS, families=[*FAMILIES])
