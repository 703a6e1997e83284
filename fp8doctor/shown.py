"""Results that show themselves, printed and in a notebook: their base, two reports compared, FP8's health."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.two_reports import Comparison as Compared
from fp8doctor.diagnosis.two_reports import compared
from fp8doctor.errors import in_one_sentence
from fp8doctor.facts.record import encode
from fp8doctor.files import write_text

if TYPE_CHECKING:
    from fp8doctor.health.record import Health as HealthFile
    from fp8doctor.health.verdict import HealthVerdict
    from fp8doctor.render.page import Page


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
        from fp8doctor.render.text import as_text

        return as_text(self.page(), width=width)

    def to_markdown(self) -> str:
        from fp8doctor.render.markdown import as_markdown

        return as_markdown(self.page())

    def to_html(self) -> str:
        from fp8doctor.render.html import as_html

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
        from fp8doctor.render.html import as_html

        return as_html(self.page(), template="fragment.html.jinja")


class Comparison(Shown, Struct, frozen=True):
    """Two reports side by side: ``found`` has the numbers, ``reports`` what was compared."""

    found: Compared
    reports: tuple[Document, Document]

    def page(self) -> Page:
        from fp8doctor.render.compare_page import page

        return page(self.found, self.reports)

    def _line(self) -> str:
        return self.found.summary

    def to_json(self) -> str:
        return self.found.to_json()


class Health(Shown, Struct, frozen=True):
    """FP8's health over a run: ``samples`` holds what was recorded, ``verdict`` what it means."""

    samples: HealthFile
    verdict: HealthVerdict

    def page(self, *, verbose: bool = True) -> Page:
        from fp8doctor.render.health_page import page

        return page(self.samples, self.verdict, verbose=verbose)

    def _line(self) -> str:
        return self.verdict.summary

    def to_json(self) -> str:
        health, samples = self.samples, [sample for _, sample in self.samples.samples]
        run = {"file": health.name, "verdict": self.verdict, "jobs": health.headers, "samples": samples}
        return encode({"schema_version": 1, "kind": "health", "runs": [run]}).decode()


@in_one_sentence
def compare(first: Document | str | Path, second: Document | str | Path) -> Comparison:
    """Compare two reports or their files: time, tokens/s, memory, and why they differ. Raises `UserError`."""
    (one, its_name), (other, name) = (
        (each, "report") if isinstance(each, Document) else (replay(each), Path(each).name)
        for each in (first, second)
    )
    return Comparison(compared(one, other, (its_name, name)), (one, other))


@in_one_sentence
def load_health(path: str | Path) -> Health:
    """Read a file of ``fp8doctor run --health``, or of a callback's. Raises `UserError`."""
    from fp8doctor.health.record import read_health
    from fp8doctor.health.verdict import conclude

    samples = read_health(Path(path))
    return Health(samples, conclude(samples))
