"""The gate: requirements for a report, or for the second of two, and why they are missed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from msgspec import Struct

from fp8doctor.answer.sentences import box
from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.cli.console import FAILED, FOUND, OK, complain
from fp8doctor.diagnosis.document import Document, read_saved
from fp8doctor.diagnosis.estimate import why_no_estimate
from fp8doctor.diagnosis.two_reports import (
    SAME_JOB,
    Comparison,
    cpu_times,
    regression,
    timed_step,
    unknown_of_job,
    unlike,
)
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts

MAX_REGRESSION_PCT = 5.0
"""Default of ``--max-regression``, in percent of the baseline's step time. A choice."""


class Gate(Struct, frozen=True):
    fail_on: Severity | None = None
    """None: findings do not count."""
    require_fp8: bool = False
    min_speedup: float | None = None
    min_estimated_speedup: float | None = None
    strict: bool = False
    max_regression: float | None = None
    baseline: tuple[str, Facts] | None = None
    """A saved report to compare the step time with, and its name."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> Gate:
        """Read the gate's options. Raises `UserError` for an unusable baseline."""
        given = {name: options[name] for name in cls.__struct_fields__ if options.get(name)}
        given["fail_on"] = options["fail_on"] if options["fail_on"] in SEVERITIES else None
        if "baseline" in options:
            given["baseline"] = _baseline(options["baseline"])
        return cls(**given)

    @property
    def asks(self) -> bool:
        return self != Gate(max_regression=self.max_regression)

    def judged(self, report: Document) -> int:
        """Hold the report to the gate and say why it is missed; the exit code."""
        if self.baseline and not is_same_job(self.baseline[1], report.facts, self.baseline[0]):
            return FAILED
        return exit_code(self.missed(report))

    def missed(self, report: Document) -> Iterator[str]:
        if self.require_fp8 and (why := report.why_not_in_fp8()):
            yield f"FP8 is required. {why}"
        if self.fail_on and report.reaches(self.fail_on):
            codes = ", ".join(_grave(report, self.fail_on))
            found = f"Found {codes} with --fail-on {self.fail_on}" if codes else box(report.answer).title.text
            yield f"{found}. Use --fail-on never to ignore findings."
        speedup, verdict = report.gpu_speedup, report.verdict
        yield from self.too_slow(
            {
                "The times come from a CPU and do not apply to FP8 on a GPU.": report.on_cpu,
                "No step was timed.": verdict.step_ms is None,
                "The timing does not tell whether FP8 is faster.": verdict.status == "open",
                "No speedup of FP8 was measured.": speedup is None and self.min_speedup is not None,
            },
            speedup,
            "FP8 runs at {} of the best BF16, measured.",
        )
        if least := self.min_estimated_speedup:
            how = f"estimated for {report.modelled_gpu}, not measured" if speedup is None else "measured"
            known, option = speedup or verdict.estimated_speedup, f"--min-estimated-speedup {least:g}"
            if known is None:
                why = why_no_estimate(report.facts, report.findings)
                yield f"No speedup of FP8 can be estimated. {why} {option} needs an estimate."
            elif known < least:
                below = times_below(known, least)
                yield f"FP8 runs at {below} of the best BF16, {how}. {option} asks for more."
        if self.baseline:
            most = MAX_REGRESSION_PCT if self.max_regression is None else self.max_regression
            yield from longer(self.baseline[1], report.facts, self.baseline[0], most)

    def too_slow(self, unclear: dict[str, bool], speedup: float | None, told: str) -> Iterator[str]:
        """Say why a measured speedup, ``told`` so, is not what is asked for: unclear, or too small."""
        least = self.min_speedup
        if least is None and not self.strict:
            return
        option = "--strict" if least is None else f"--min-speedup {least:g}"
        if why := next((why for why, holds in unclear.items() if holds), None):
            yield f"{why} {option} needs a clear time on a GPU."
        elif least is not None and speedup is not None and speedup < least:
            yield f"{told.format(times_below(speedup, least))} {option} asks for more."

    def missed_by_second(self, found: Comparison, first: Document, second: Document) -> Iterator[str]:
        """Explain each requirement that the second of two reports misses against the first."""
        cpu, speedup = cpu_times(*found.steps), found.speedup
        unclear = {
            f"{cpu[:1].upper()}{cpu[1:]}.": bool(cpu),
            "There are not two measured steps.": speedup is None,
            "The timing is too noisy to tell which is faster.": speedup is not None
            and speedup.side == "open",
        }
        value = speedup.value if speedup else None
        yield from self.too_slow(unclear, value, "The second runs at {} of the first's speed.")
        if self.max_regression is not None:
            yield from longer(first.facts, second.facts, found.files[0], self.max_regression)
        known = {each.code for each in first.findings}
        if self.fail_on and (codes := [code for code in _grave(second, self.fail_on) if code not in known]):
            yield f"Only the second has {', '.join(codes)}. --fail-on {self.fail_on} fails on this."


def exit_code(missed: Iterable[str]) -> int:
    """Say why the gate is missed, if it is, a line for each reason; the exit code."""
    code = OK
    for why in missed:
        complain(f"exit code {FOUND}: {why}")
        code = FOUND
    return code


def _grave(report: Document, least: Severity) -> list[str]:
    grave = SEVERITIES[SEVERITIES.index(least) :]
    return [*dict.fromkeys(each.code for each in report.findings if (each.severity or "info") in grave)]


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


def times_below(speedup: float, wanted: float) -> str:
    """Write a speedup with enough digits to show that it is below the required one."""
    digits = next((n for n in (2, 3, 4) if round(speedup, n) < wanted), 5)
    return f"{speedup:.{digits}f}x"


def _baseline(file: Path | None) -> tuple[str, Facts] | None:
    if file is not None:
        facts = read_saved(file)[0]
        step = timed_step(facts, file.name)
        if not step.step_ms:
            raise UserError(f"{file.name} is no baseline, it holds no time of a step: {step.missing}")
        return file.name, facts
    context = click.get_current_context(silent=True)
    if context and context.get_parameter_source("max_regression") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--max-regression needs --baseline FILE, the report to compare with.")
    return None
