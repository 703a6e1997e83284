"""The gate: what a report has to reach, and why it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import Struct

from fp8doctor.areas import SEVERITIES, Severity

if TYPE_CHECKING:
    from fp8doctor.diagnosis.document import Document
    from fp8doctor.facts import Facts

MAX_REGRESSION_PCT = 5.0
"""Per cent that a step may take longer than the baseline's where nothing else is said. A choice."""

MOST_NAMED = 6
"""Codes that one sentence names."""


class Baseline(Struct, frozen=True):
    """A saved report that a step is held against."""

    name: str
    facts: Facts
    most_pct: float


class Gate(Struct, frozen=True):
    """What a report has to reach."""

    fail_on: Severity | None = None
    """None: findings do not count."""
    min_speedup: float | None = None
    strict: bool = False
    baseline: Baseline | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Gate:
        """Read the options of the gate. Raises `UserError` for a baseline that is none."""
        return cls(
            fail_on=next((each for each in SEVERITIES if each == options["fail_on"]), None),
            min_speedup=options.get("min_speedup"),
            strict=bool(options.get("strict")),
            baseline=_baseline(options.get("baseline"), options.get("max_regression")),
        )

    @property
    def asks(self) -> bool:
        """Whether anything can be missed."""
        return self != Gate()

    def missed(self, report: Document) -> tuple[str, ...]:
        """Say what the report does not reach, a clause each; nothing where it passes."""
        return tuple(
            clause
            for clause in (self._too_grave(report), *self._too_slow(report), self._regression(report))
            if clause
        )

    def _too_grave(self, report: Document) -> str | None:
        if self.fail_on is None or not report.reaches(self.fail_on):
            return None
        least = SEVERITIES.index(self.fail_on)
        codes = [each.code for each in report.findings if SEVERITIES.index(each.severity or "info") >= least]
        if not codes:
            return f"the verdict counts as an error: {report.verdict.status} (--fail-on {self.fail_on})"
        return f"found {_named(codes)} (--fail-on {self.fail_on})"

    def _too_slow(self, report: Document) -> Iterator[str]:
        verdict, wanted = report.verdict, self.min_speedup
        speedup = verdict.speedup if verdict.basis == "measured" else None
        option = "--strict" if self.strict else f"--min-speedup {wanted:g}" if wanted is not None else ""
        if option and verdict.status == "too_noisy":
            yield f"the timing is too noisy to tell ({option})"
        elif option and verdict.step_ms is None:
            yield f"nothing was measured ({option})"
        elif wanted is not None and speedup is None:
            yield f"no speedup of FP8 was measured: {verdict.status} (--min-speedup {wanted:g})"
        elif wanted is not None and speedup is not None and speedup < wanted:
            yield f"FP8 is measured at {speedup:.2f}x of the best BF16 (--min-speedup {wanted:g})"

    def _regression(self, report: Document) -> str | None:
        if self.baseline is None:
            return None
        from fp8doctor.diagnosis.regression import regression

        most = self.baseline.most_pct
        found = regression(self.baseline.facts, report.facts, self.baseline.name, most)
        return f"{found} (--max-regression {most:g})" if found else None


def _named(codes: list[str]) -> str:
    more = f" and {len(codes) - MOST_NAMED} more" if len(codes) > MOST_NAMED else ""
    return ", ".join(codes[:MOST_NAMED]) + more


def _baseline(file: Path | None, most_pct: float | None) -> Baseline | None:
    if file is None:
        context = click.get_current_context(silent=True)
        if context and context.get_parameter_source("max_regression") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--max-regression needs --baseline, the report to be held against.")
        return None
    from fp8doctor.diagnosis.document import read_saved
    from fp8doctor.diagnosis.regression import checked_baseline

    facts, _, _ = read_saved(file)
    most = MAX_REGRESSION_PCT if most_pct is None else most_pct
    return Baseline(file.name, checked_baseline(facts, file.name), most)
