"""The gate: requirements for a report, and why it misses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from msgspec import Struct

from fp8doctor.answer.sentences import box
from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.cli.console import complain
from fp8doctor.diagnosis.comparison import SAME_JOB, checked_baseline, regression, unknown_of_job, unlike
from fp8doctor.diagnosis.document import Document, read_saved
from fp8doctor.diagnosis.estimate import why_no_estimate
from fp8doctor.facts import Facts

MAX_REGRESSION_PCT = 5.0
"""Default of ``--max-regression``, in percent of the baseline's step time. A choice."""

MOST_NAMED = 6
"""Codes in one sentence."""


class Baseline(Struct, frozen=True):
    """A saved report to compare the step time with."""

    name: str
    facts: Facts
    most_pct: float


class Gate(Struct, frozen=True):
    """Requirements for a report."""

    fail_on: Severity | None = None
    """None: findings do not count."""
    require_fp8: bool = False
    min_speedup: float | None = None
    min_estimated_speedup: float | None = None
    strict: bool = False
    baseline: Baseline | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Gate:
        """Read the gate's options. Raises `UserError` for an unusable baseline."""
        return cls(
            fail_on=next((each for each in SEVERITIES if each == options["fail_on"]), None),
            require_fp8=bool(options.get("require_fp8")),
            min_speedup=options.get("min_speedup"),
            min_estimated_speedup=options.get("min_estimated_speedup"),
            strict=bool(options.get("strict")),
            baseline=_baseline(options.get("baseline"), options.get("max_regression")),
        )

    @property
    def asks(self) -> bool:
        """Return whether there is any requirement."""
        return self != Gate()

    def missed(self, report: Document) -> Iterator[str]:
        """Explain each requirement that the report misses."""
        if self.require_fp8 and (why := report.why_not_in_fp8()):
            yield f"FP8 is required. {why}"
        if self.fail_on and report.reaches(self.fail_on):
            yield f"{_graver(report, self.fail_on)} Use --fail-on never to ignore findings."
        if self.strict or self.min_speedup is not None:
            yield from self._too_slow(report)
        if self.min_estimated_speedup is not None:
            yield from _too_slow_by_estimate(report, self.min_estimated_speedup)
        if self.baseline:
            facts, name, most = self.baseline.facts, self.baseline.name, self.baseline.most_pct
            yield from longer(facts, report.facts, name, most)

    def _too_slow(self, report: Document) -> Iterator[str]:
        wanted, speedup = self.min_speedup, report.gpu_speedup
        option = asked(wanted)
        if report.on_cpu:
            yield f"The times come from a CPU and do not apply to FP8 on a GPU. {option} needs a GPU."
        elif report.verdict.step_ms is None:
            yield f"No step was timed. {option} needs a step timed on a GPU."
        elif report.verdict.status == "open":
            yield f"The timing does not tell whether FP8 is faster. {option} needs a clear answer."
        elif wanted is not None and speedup is None:
            yield f"No speedup of FP8 was measured. {option} needs FP8 and BF16 timed on a GPU."
        elif wanted is not None and speedup is not None:
            yield from _below(speedup, wanted, "measured", "--min-speedup")


def asked(min_speedup: float | None) -> str:
    """Name the option that asks for a measured speedup."""
    return "--strict" if min_speedup is None else f"--min-speedup {min_speedup:g}"


def _graver(report: Document, least: Severity) -> str:
    """Name what is at or above a severity: findings, else the verdict."""
    grave = SEVERITIES[SEVERITIES.index(least) :]
    codes = [each.code for each in report.findings if (each.severity or "info") in grave]
    if codes:
        more = f" and {len(codes) - MOST_NAMED} more" if len(codes) > MOST_NAMED else ""
        return f"Found {', '.join(codes[:MOST_NAMED])}{more} with --fail-on {least}."
    return f"{box(report.answer).title.text}."


def _too_slow_by_estimate(report: Document, wanted: float) -> Iterator[str]:
    """Compare the measured speedup, or else the estimated one, with the required one."""
    option, estimate = "--min-estimated-speedup", report.verdict.estimated_speedup
    if report.gpu_speedup is not None:
        yield from _below(report.gpu_speedup, wanted, "measured", option)
    elif estimate is not None:
        yield from _below(estimate, wanted, f"estimated for {report.modelled_gpu}, not measured", option)
    else:
        why = why_no_estimate(report.facts, report.findings)
        yield f"No speedup of FP8 can be estimated. {why} {option} {wanted:g} needs an estimate."


def is_same_job(first: Facts, second: Facts, name: str) -> bool:
    """Return False, and say why, if GPU, model or batch differ from those of the report saved as ``name``."""
    differ = [each for each in unlike(first, second) if each.what in SAME_JOB]
    apart = [f"{each.what} {each.first}, not {each.second}" for each in differ]
    if apart:
        complain(
            f"exit code 2: {name} is of another job, so their times cannot be compared: {'; '.join(apart)}. "
            "Compare with a report that --save wrote of this job."
        )
    elif unknown := unknown_of_job(first, second):
        complain(f"{name} may be of another job: the reports do not record {' and '.join(unknown)} of both.")
    return not apart


def longer(first: Facts, second: Facts, name: str, most_pct: float) -> Iterator[str]:
    """Say that the second step is longer by more than this, if so."""
    if found := regression(first, second, name, most_pct):
        yield f"{found[:1].upper()}{found[1:]}. --max-regression allows {most_pct:g}%."


def _below(speedup: float, wanted: float, how: str, option: str) -> Iterator[str]:
    if speedup < wanted:
        reached = times_below(speedup, wanted)
        yield f"FP8 runs at {reached} of the best BF16, {how}. {option} asks for {wanted:g}x."


def times_below(speedup: float, wanted: float) -> str:
    """Write a speedup with enough digits to show that it is below the required one."""
    digits = next((n for n in (2, 3, 4) if round(speedup, n) < wanted), 5)
    return f"{speedup:.{digits}f}x"


def _baseline(file: Path | None, most_pct: float | None) -> Baseline | None:
    if file is None:
        context = click.get_current_context(silent=True)
        if context and context.get_parameter_source("max_regression") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--max-regression needs --baseline FILE, the report to compare with.")
        return None
    facts, _, _ = read_saved(file)
    most = MAX_REGRESSION_PCT if most_pct is None else most_pct
    return Baseline(file.name, checked_baseline(facts, file.name), most)
