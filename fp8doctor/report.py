"""The results of the Python API: a report, two compared, FP8's health; printed, in a notebook and saved."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.diagnosis import two_reports
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.errors import UserError, in_one_sentence, require
from fp8doctor.facts import Facts
from fp8doctor.facts.record import encode
from fp8doctor.files import write_text
from fp8doctor.finding import Finding
from fp8doctor.health.record import Health as HealthFile
from fp8doctor.health.record import read_health
from fp8doctor.health.verdict import HealthVerdict, conclude
from fp8doctor.render import report_page
from fp8doctor.render.command_pages import compare_page, health_page
from fp8doctor.render.markup import as_html, as_markdown
from fp8doctor.render.page import Page
from fp8doctor.render.text import as_text
from fp8doctor.wording import plural

if TYPE_CHECKING:
    from torch.nn import Module


class Shown:
    """A result that is a page: text where it is printed, one line at a prompt, HTML in a notebook."""

    __slots__ = ()
    if TYPE_CHECKING:
        to_json: Any
        page: Callable[[], Page]
        _line: Callable[[], str]
        """Says the result in one line."""

    def to_text(self, width: int = 100) -> str:
        """Return what the command line prints."""
        return as_text(self.page(), width=width)

    def to_markdown(self) -> str:
        return as_markdown(self.page())

    def to_html(self) -> str:
        return as_html(self.page())

    @in_one_sentence
    def save(self, path: str | Path) -> None:
        """Write the result as JSON. Raises `UserError` if the file cannot be written."""
        write_text(Path(path), self.to_json())

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._line()}>"

    def _repr_html_(self) -> str:
        return as_html(self.page(), template="fragment.html.jinja")


class Prescription(tuple[Step, ...]):
    """The plan: its steps in order, which can be applied to a model."""

    facts: Facts

    def __new__(cls, steps: Iterable[Step] = (), facts: Facts | None = None) -> Prescription:
        plan = super().__new__(cls, steps)
        plan.facts = facts if facts is not None else Facts()
        return plan

    @in_one_sentence
    def apply(self, model: Module) -> Any:
        """Apply the steps that change a model, with the timed functions; return the model.

        Changes the model in place if possible, and says so on stderr, a line for each step. One warning names
        the steps that do not apply, do not change a model (environment, optimizer, batch, autocast), or take
        FP8 out on an estimate.
        """
        from fp8doctor.trial.treatments.apply import carry_out

        require(hasattr(model, "named_modules"), "model", "a torch.nn.Module", model)
        untimed = [step.treatment for step in self if step.removes_fp8_on_an_estimate]
        timed = (step.treatment for step in self if not step.removes_fp8_on_an_estimate)
        found = carry_out(timed, model, self.facts)
        for each in found.done:
            print(f"fp8doctor applied {each.name}: {each.summary}", file=sys.stderr)
        kept = "FP8 stays on: this was estimated, not timed"
        left = (*found.left, *(f"{each.name} ({kept})" for each in untimed))
        said = [f"fp8doctor did not carry out {', '.join(left)}"] if left else []
        if found.replaced:
            said.append("parameters were replaced: make the optimizer again")
        if said:
            warnings.warn("; ".join(said), stacklevel=3)
        return found.model

    def __repr__(self) -> str:
        lines = [f"{number}. {step!r}" for number, step in enumerate(self, 1)]
        return "\n".join(lines) or "<Prescription: nothing to change>"


class ReportFailed(Exception):
    """Raised by `Report.raise_for`: severe findings, or FP8 is required and missing."""

    def __init__(self, message: str, findings: tuple[Finding, ...]) -> None:
        super().__init__(message)
        self.findings = findings


class Report(Shown, Document, frozen=True, kw_only=True):
    """The results for one job: a `Document` that can be shown, saved and applied."""

    if TYPE_CHECKING:
        prescription: Prescription

    @classmethod
    def of(cls, document: Document) -> Report:
        fields = {name: getattr(document, name) for name in cls.__struct_fields__}
        return cls(**fields | {"prescription": Prescription(document.prescription, document.facts)})

    @in_one_sentence
    def raise_for(
        self, severity: Severity | Literal["never"] = "error", *, require_fp8: bool = False
    ) -> None:
        """Raise `ReportFailed` if a finding or the verdict is at or above ``severity``.

        Use it before an expensive run. ``require_fp8`` also raises if no layer of the model trains in FP8, if
        FP8 is emulated, raises or does not learn, or if the report cannot tell.
        """
        if severity not in ("never", *SEVERITIES):
            raise UserError(f"severity is one of never, {', '.join(SEVERITIES)}, not {severity!r}")
        graver = SEVERITIES[SEVERITIES.index(severity) :] if severity != "never" else ()
        grave = tuple(each for each in self.findings if (each.severity or "info") in graver)
        lines = [f"{each.code} {each.name}: {each.title}" for each in grave]
        if severity != "never" and not lines and self.reaches(severity):
            lines = [self.verdict.summary]
        said = [f"FP8 is required. {why}"] if require_fp8 and (why := self.why_not_in_fp8()) else []
        said += [f"fp8doctor found: {'; '.join(lines)}"] if lines else []
        if said:
            raise ReportFailed(" ".join(said), grave)

    def scalars(self) -> dict[str, float]:
        """Return the report's numbers for a tracker; a number that is unknown, or a CPU's time, is left out.

        The names end in their unit, ``_x`` is BF16's time / FP8's, and an estimate says so.
        """
        answer, step = self.verdict, two_reports.timed_step(self.facts, "")
        numbers = {
            "speedup_x": self.gpu_speedup,
            "estimated_speedup_x": answer.estimated_speedup,
            "step_ms": None if step.on_cpu else step.step_ms,
            "bf16_step_ms": None if self.on_cpu else answer.bf16_step_ms,
            "tokens_per_s": None if step.on_cpu else step.tokens_per_s,
            "peak_gib": step.peak_gib,
            "errors": sum(each.severity == "error" for each in self.findings),
            "warnings": sum(each.severity == "warning" for each in self.findings),
        }
        return {f"fp8doctor/{name}": float(number) for name, number in numbers.items() if number is not None}

    def page(self) -> Page:
        return report_page.page(self, held_in="report")

    def _line(self) -> str:
        found = plural(len(self.findings), "finding")
        return f"{self.verdict.status}, {found}, {plural(len(self.prescription), 'step')} to take"


class Comparison(Shown, Struct, frozen=True):
    """Two reports side by side: ``found`` has the numbers, ``reports`` what was compared."""

    found: two_reports.Comparison
    reports: tuple[Document, Document]

    def page(self) -> Page:
        return compare_page(self.found, self.reports)

    def _line(self) -> str:
        return self.found.summary

    def to_json(self) -> str:
        return self.found.to_json()


class Health(Shown, Struct, frozen=True):
    """FP8's health over a run: ``samples`` holds what was recorded, ``verdict`` what it means."""

    samples: HealthFile
    verdict: HealthVerdict

    def page(self, *, verbose: bool = True) -> Page:
        return health_page(self.samples, self.verdict, verbose=verbose)

    def _line(self) -> str:
        return self.verdict.summary

    def to_json(self) -> str:
        health, samples = self.samples, [sample for _, sample in self.samples.samples]
        run = {"file": health.name, "verdict": self.verdict, "jobs": health.headers, "samples": samples}
        return encode({"schema_version": 1, "kind": "health", "runs": [run]}).decode()


@in_one_sentence
def load_report(
    path: str | Path,
    *,
    assume_gpu: str | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    checks: Sequence[Path] = (),
) -> Report:
    """Run this version's checks on the facts of a saved report. Raises `UserError`."""
    return Report.of(replay(path, assume_gpu=assume_gpu, select=select, ignore=ignore, checks=checks))


@in_one_sentence
def compare(first: Document | str | Path, second: Document | str | Path) -> Comparison:
    """Compare two reports or their files: time, tokens/s, memory, and why they differ. Raises `UserError`."""
    (one, its_name), (other, name) = (
        (each, "report") if isinstance(each, Document) else (replay(each), Path(each).name)
        for each in (first, second)
    )
    return Comparison(two_reports.compared(one, other, (its_name, name)), (one, other))


@in_one_sentence
def load_health(path: str | Path) -> Health:
    """Read a file of ``fp8doctor run --health``, or of a callback's. Raises `UserError`."""
    samples = read_health(Path(path))
    return Health(samples, conclude(samples))
