"""The report: facts, what the checks made of them, the verdict and the prescription. Saved, replayed, rendered."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.finding import SEVERITIES, Finding, Outcome, Severity
from fp8doctor.prescription import Prescription, Step
from fp8doctor.record import Record, UnreadableDocument, decode, encode, from_builtins, to_builtins
from fp8doctor.verdict import Verdict

if TYPE_CHECKING:
    Plan = Prescription
else:
    Plan = tuple[Step, ...]  # what msgspec writes a Prescription as

SCHEMA_VERSION = 1
"""Raised only when a key is renamed or changes its meaning; new keys keep it."""


class Tool(Record, frozen=True, kw_only=True):
    """What wrote the report."""

    name: str = "fp8doctor"
    version: str = ""


class ReportFailed(Exception):
    """Raised by `Report.raise_for`: the report holds findings at or above the severity asked for."""

    def __init__(self, message: str, findings: tuple[Finding, ...]) -> None:
        super().__init__(message)
        self.findings = findings


class Report(Record, frozen=True, kw_only=True):
    """Everything fp8doctor has to say about one job."""

    tool: Tool
    created_at: str
    """UTC, ISO 8601, to the second."""
    facts: Facts
    verdict: Verdict
    findings: tuple[Finding, ...]
    """In the order of the areas."""
    prescription: Plan
    """Its steps in order; `fp8doctor.prescription.Prescription.apply` carries them out on a live model."""
    outcomes: tuple[Outcome, ...]
    """One for every check that was selected."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, as `fp8doctor/report.schema.json` describes them."""
        data = to_builtins(self)
        return {"schema_version": SCHEMA_VERSION, **data, "facts": self.facts.to_dict()}

    def to_json(self) -> str:
        """The JSON document, the same bytes for the same report."""
        return encode(self.to_dict()).decode()

    def save(self, path: str | Path) -> None:
        """Write the report as JSON. Raises `UserError` when the file cannot be written."""
        write_text(Path(path), self.to_json())

    def worst(self) -> Severity | None:
        """The gravest severity among the findings and the verdict; None when nothing was found."""
        grades = [SEVERITIES.index(finding.severity or "info") for finding in self.findings]
        if self.verdict.status in ("fp8_not_engaged", "fp8_slower"):
            grades.append(SEVERITIES.index("error"))
        return SEVERITIES[max(grades)] if grades else None

    def reaches(self, severity: Severity) -> bool:
        """Whether something is at or above ``severity``."""
        worst = self.worst()
        return worst is not None and SEVERITIES.index(worst) >= SEVERITIES.index(severity)

    def raise_for(self, severity: Severity = "error") -> None:
        """Raise `ReportFailed` when something is at or above ``severity``; for a check before an expensive run."""
        if severity not in SEVERITIES:
            raise ValueError(f"severity is one of {', '.join(SEVERITIES)}, not {severity!r}")
        if self.reaches(severity):
            grave = tuple(f for f in self.findings if SEVERITIES.index(f.severity or "info") >= SEVERITIES.index(severity))
            lines = [f"{f.code} {f.name}: {f.title}" for f in grave] or [self.verdict.summary]
            raise ReportFailed("fp8doctor found: " + "; ".join(lines), grave)

    def __str__(self) -> str:
        from fp8doctor.render.text import render

        return render(self)

    def _repr_markdown_(self) -> str:
        from fp8doctor.render.markdown import render

        return render(self)


@functools.cache
def tool() -> Tool:
    """This version of fp8doctor; a bare checkout that was never installed reads its own setup.cfg."""
    from importlib import metadata

    try:
        return Tool(version=metadata.version("fp8doctor"))
    except metadata.PackageNotFoundError:
        from configparser import ConfigParser

        config = ConfigParser()
        config.read(Path(__file__).resolve().parents[1] / "setup.cfg")
        return Tool(version=config.get("metadata", "version", fallback="unknown"))


def now() -> str:
    """The current time as reports carry it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_text(path: Path, text: str) -> None:
    """Write a file in one go. Raises `UserError` naming the reason."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def read_saved(path: str | Path) -> tuple[Facts, Tool, str]:
    """Facts, tool and time of a saved report.

    Raises `UserError` in one sentence: no such file, not JSON, truncated, of a newer schema, or not a report.
    """
    path = Path(path)
    try:
        data = decode(path.read_bytes())
        if not isinstance(data, dict) or "schema_version" not in data or "facts" not in data:
            raise UnreadableDocument("it is JSON, but not a report that 'fp8doctor --save' wrote")
        version = data["schema_version"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise UnreadableDocument(f"its schema_version is {version!r}")
        if version > SCHEMA_VERSION:
            raise UnreadableDocument(f"it was written by a newer fp8doctor (schema {version}, this one reads up to {SCHEMA_VERSION}); upgrade fp8doctor")
        facts = Facts.from_dict(data["facts"])
        saved_tool = from_builtins(Tool, data.get("tool", {}))
        created_at = data.get("created_at")
        return facts, saved_tool, created_at if isinstance(created_at, str) else ""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot replay {path}: {error}") from None


def schema() -> dict[str, Any]:
    """The JSON Schema of a report, generated from the records."""
    import msgspec

    document = msgspec.json.schema(Report)
    definition = document["$defs"]["Report"]
    definition["properties"] = {"schema_version": {"type": "integer", "const": SCHEMA_VERSION}, **definition["properties"]}
    definition["required"] = ["schema_version", *definition["required"]]
    del document["$defs"]["Facts"]["properties"]["unrecognized"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fp8doctor report", **document}


def shipped_schema() -> dict[str, Any]:
    """The schema file that ships with the package; a test holds it to `schema`."""
    import json
    from importlib import resources

    shipped: dict[str, Any] = json.loads(resources.files("fp8doctor").joinpath("report.schema.json").read_text("utf-8"))
    return shipped
