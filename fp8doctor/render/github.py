"""The report as workflow commands of GitHub Actions: an annotation for the verdict and for each finding."""

from __future__ import annotations

from fp8doctor.areas import Severity
from fp8doctor.diagnosis.document import Document
from fp8doctor.render.notices import Notice, file_of, notices

COMMANDS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}

DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
"""What ends a command, as its message carries it. Source: actions/toolkit, core/src/command.ts."""

PROPERTY = {**DATA, ":": "%3A", ",": "%2C"}
"""What ends the value of a property too."""


def render(report: Document, *, file: str = "") -> str:
    """Write the annotations, a line each; they stand at the top of ``file``, else of the one that the report
    names."""
    place = file or file_of(report)
    return "".join(f"{_annotation(notice, place)}\n" for notice in notices(report))


def _annotation(notice: Notice, file: str) -> str:
    properties = {"file": file, "line": "1"} if file else {}
    properties["title"] = f"{notice.code} {notice.name}"
    named = ",".join(f"{name}={_escaped(value, PROPERTY)}" for name, value in properties.items())
    message = "\n".join(filter(None, (notice.title, notice.text)))
    return f"::{COMMANDS[notice.severity]} {named}::{_escaped(message, DATA)}"


def _escaped(text: str, marks: dict[str, str]) -> str:
    return "".join(marks.get(each, each) for each in text)
