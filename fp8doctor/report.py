"""The public face of a report: what `inspect_model` and `load_report` return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.facts import Facts
from fp8doctor.files import write_text
from fp8doctor.finding import Finding
from fp8doctor.wording import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.nn import Module


class Prescription(tuple[Step, ...]):
    """The plan: its steps in order, and a way to carry them out."""

    facts: Facts

    def __new__(cls, steps: Iterable[Step] = (), facts: Facts | None = None) -> Prescription:
        plan = super().__new__(cls, steps)
        plan.facts = facts if facts is not None else Facts()
        return plan

    def apply(self, model: Module) -> Any:
        """Carry out on ``model`` what is a change of a model, by the functions that were timed; return it, or
        what stands for it.

        It is changed in place where that is possible. What is no change of a model (environment, optimizer,
        batch, autocast) or does not apply is named in one warning.
        """
        from fp8doctor.trial.treatments import carry_out

        return carry_out((step.treatment for step in self), model, self.facts)

    def __repr__(self) -> str:
        lines = [f"{number}. {step!r}" for number, step in enumerate(self, 1)]
        return "\n".join(lines) or "<Prescription: nothing to change>"


class ReportFailed(Exception):
    """Raised by `Report.raise_for`: the report holds findings at or above the severity asked for."""

    def __init__(self, message: str, findings: tuple[Finding, ...]) -> None:
        super().__init__(message)
        self.findings = findings


class Report(Document, frozen=True, kw_only=True):
    """Everything fp8doctor has to say about one job: a `Document` that shows itself, is saved, and can be
    carried out."""

    if TYPE_CHECKING:
        prescription: Prescription

    @classmethod
    def of(cls, document: Document) -> Report:
        """The public face of a document."""
        fields = {name: getattr(document, name) for name in cls.__struct_fields__}
        return cls(**fields | {"prescription": Prescription(document.prescription, document.facts)})

    def save(self, path: str | Path) -> None:
        """Write the report as JSON. Raises `UserError` when the file cannot be written."""
        write_text(Path(path), self.to_json())

    def raise_for(self, severity: Severity = "error") -> None:
        """Raise `ReportFailed` when something is at or above ``severity``; for a check before an expensive
        run."""
        if severity not in SEVERITIES:
            raise ValueError(f"severity is one of {', '.join(SEVERITIES)}, not {severity!r}")
        if self.reaches(severity):
            grave = tuple(
                f
                for f in self.findings
                if SEVERITIES.index(f.severity or "info") >= SEVERITIES.index(severity)
            )
            lines = [f"{f.code} {f.name}: {f.title}" for f in grave] or [self.verdict.summary]
            raise ReportFailed("fp8doctor found: " + "; ".join(lines), grave)

    def plot(self) -> Figure:
        """Draw where the step goes and what its difference from BF16 is made of.

        Needs matplotlib, ``pip install 'fp8doctor[plot]'``. Raises `UserError` in a sentence without it, and
        where nothing was timed.
        """
        from fp8doctor.render.plot import plot

        return plot(self)

    def __str__(self) -> str:
        return self._printed("report")

    def _printed(self, held_in: str) -> str:
        """Write it as text, for whoever holds it in this variable."""
        from fp8doctor.render.text import render

        return render(self, held_in=held_in)

    def __repr__(self) -> str:
        found = plural(len(self.findings), "finding")
        return f"<Report: {self.verdict.status}, {found}, {plural(len(self.prescription), 'step')} to take>"

    def _repr_html_(self) -> str:
        from fp8doctor.render.html import fragment

        return fragment(self)

    def _repr_markdown_(self) -> str:
        from fp8doctor.render.markdown import render

        return render(self)


def load_report(
    path: str | Path,
    *,
    assume_gpu: str | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    checks: Sequence[Path] = (),
) -> Report:
    """The checks of this version over the facts of a saved report, with its time and tool kept. Raises
    `UserError`."""
    return Report.of(replay(path, assume_gpu=assume_gpu, select=select, ignore=ignore, checks=checks))
