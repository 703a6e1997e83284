"""The gate: requirements for a report, and why it misses them."""

from __future__ import annotations

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

    def missed(self, report: Document) -> tuple[str, ...]:
        """Explain each requirement that the report misses; empty if it passes."""
        told = (
            self._without_fp8(report),
            self._too_grave(report),
            self._too_slow(report),
            self._too_slow_by_estimate(report),
            self._regression(report),
        )
        return tuple(filter(None, told))

    def _without_fp8(self, report: Document) -> str | None:
        if not self.require_fp8:
            return None
        why = report.why_not_in_fp8()
        return f"FP8 is required. {why}" if why else None

    def _too_grave(self, report: Document) -> str | None:
        if self.fail_on is None or not report.reaches(self.fail_on):
            return None
        least = SEVERITIES.index(self.fail_on)
        codes = [each.code for each in report.findings if SEVERITIES.index(each.severity or "info") >= least]
        if codes:
            why = f"Found {_named(codes)} with --fail-on {self.fail_on}."
        else:
            from fp8doctor.answer.sentences import box

            why = f"{box(report.answer).title.text}."
        return f"{why} Use --fail-on never to ignore findings."

    def _too_slow(self, report: Document) -> str | None:
        verdict, wanted = report.verdict, self.min_speedup
        if wanted is None and not self.strict:
            return None
        option = "--strict" if wanted is None else f"--min-speedup {wanted:g}"
        if report.on_cpu:
            return f"The times come from a CPU and do not apply to FP8 on a GPU. {option} needs a GPU."
        if verdict.step_ms is None:
            return f"No step was timed. {option} needs a step timed on a GPU."
        if verdict.status == "open":
            return f"The timing does not tell whether FP8 is faster. {option} needs a clear answer."
        if wanted is None:
            return None
        if report.gpu_speedup is None:
            return f"No speedup of FP8 was measured. {option} needs FP8 and BF16 timed on a GPU."
        return _below(report.gpu_speedup, wanted, "measured", "--min-speedup")

    def _too_slow_by_estimate(self, report: Document) -> str | None:
        """Compare the measured speedup, or else the estimated one, with the required one."""
        wanted, estimate = self.min_estimated_speedup, report.verdict.estimated_speedup
        if wanted is None:
            return None
        option = "--min-estimated-speedup"
        if report.gpu_speedup is not None:
            return _below(report.gpu_speedup, wanted, "measured", option)
        if estimate is not None:
            how = f"estimated for {report.modelled_gpu}, not measured"
            return _below(estimate, wanted, how, option)
        from fp8doctor.diagnosis.estimate import why_no_estimate

        why = why_no_estimate(report.facts, report.findings)
        return f"No speedup of FP8 can be estimated. {why} {option} {wanted:g} needs an estimate."

    def _regression(self, report: Document) -> str | None:
        if self.baseline is None:
            return None
        from fp8doctor.diagnosis.comparison import regression

        most = self.baseline.most_pct
        found = regression(self.baseline.facts, report.facts, self.baseline.name, most)
        return longer_than(found, most) if found else None


def is_same_job(first: Facts, second: Facts, name: str) -> bool:
    """Say if the report saved as ``name`` is of another job than the second, or if that is not known.

    Return False if GPU, model or batch differ.
    """
    from fp8doctor.analysis.timed_step import SAME_JOB, unknown_of_job, unlike
    from fp8doctor.cli.console import complain

    apart = [f"{what} {one}, not {other}" for what, one, other in unlike(first, second) if what in SAME_JOB]
    if apart:
        complain(
            f"exit code 2: {name} is of another job, so their times cannot be compared: {'; '.join(apart)}. "
            "Compare with a report that --save wrote of this job."
        )
    elif unknown := unknown_of_job(first, second):
        complain(f"{name} may be of another job: the reports do not record {' and '.join(unknown)} of both.")
    return not apart


def longer_than(found: str, most_pct: float) -> str:
    """Write a regression as a sentence."""
    return f"{found[:1].upper()}{found[1:]}. --max-regression allows {most_pct:g}%."


def _below(speedup: float, wanted: float, how: str, option: str) -> str | None:
    if speedup >= wanted:
        return None
    reached = times_below(speedup, wanted)
    return f"FP8 runs at {reached} of the best BF16, {how}. {option} asks for {wanted:g}x."


def times_below(speedup: float, wanted: float) -> str:
    """Write a speedup with enough digits to show that it is below the required one."""
    digits = next((n for n in (2, 3, 4) if round(speedup, n) < wanted), 5)
    return f"{speedup:.{digits}f}x"


def _named(codes: list[str]) -> str:
    more = f" and {len(codes) - MOST_NAMED} more" if len(codes) > MOST_NAMED else ""
    return ", ".join(codes[:MOST_NAMED]) + more


def _baseline(file: Path | None, most_pct: float | None) -> Baseline | None:
    if file is None:
        context = click.get_current_context(silent=True)
        if context and context.get_parameter_source("max_regression") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--max-regression needs --baseline FILE, the report to compare with.")
        return None
    from fp8doctor.diagnosis.comparison import checked_baseline
    from fp8doctor.diagnosis.document import read_saved

    facts, _, _ = read_saved(file)
    most = MAX_REGRESSION_PCT if most_pct is None else most_pct
    return Baseline(file.name, checked_baseline(facts, file.name), most)
