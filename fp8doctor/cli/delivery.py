"""From options to an exit code: examines or replays, delivers the report, holds it to the gates."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from fp8doctor.cli.console import complain, complain_of_known, progress, show, wants_ascii, wants_colour
from fp8doctor.cli.gate import Gate
from fp8doctor.errors import UserError
from fp8doctor.files import same_file, write_text

if TYPE_CHECKING:
    from fp8doctor.diagnosis.document import Document

FORMATS = ("text", "json", "markdown", "html")

FORMAT_OF_SUFFIX = {".txt": "text", ".json": "json", ".md": "markdown", ".html": "html"}

PLAIN_SUFFIXES = ("", ".log", ".out")

OK, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: nothing grave, findings at or above ``--fail-on``, no complete report, Ctrl-C."""

WIDEST = 100
"""Columns of a report on a wide terminal, in a pipe or in a file."""


class ReportOptions(Struct, frozen=True):
    """What the options ask for, checked before any work begins."""

    format: str
    output: Path | None
    save: Path | None
    gate: Gate
    assume_gpu: str | None
    verbose: bool
    quiet: bool
    checks: dict[str, Any]
    """``select``, ``ignore``, ``checks`` and ``reasons`` as `fp8doctor.diagnosis.diagnose` takes them."""


def checked_options(
    options: dict[str, Any], source: Path | None = None, trace: Path | None = None
) -> ReportOptions:
    """Check options before any work begins. Raises `UserError` or a usage error for what cannot be done.

    ``source`` is the file that is read, ``trace`` another one that is to be written.
    """
    from fp8doctor import registry

    if options["verbose"] and options["quiet"]:
        raise click.UsageError("-v and -q contradict each other.")
    output, save = options["output"], options["save"]
    for path in (output, save):
        if path is not None:
            writable(path)
    written: dict[str, Path | None] = {"-o": output, "--save": save, "--trace": trace}
    keep_apart(written, source)
    keep_apart(written, options.get("baseline"))
    format = format_of(options["format"], output)
    chosen = {name: options[name] for name in ("select", "ignore", "checks")}
    registry.select(registry.discover(chosen["checks"]), chosen["select"], chosen["ignore"])
    return ReportOptions(
        format=format,
        output=output,
        save=save,
        gate=Gate.of(options),
        assume_gpu=options["assume_gpu"],
        verbose=options["verbose"],
        quiet=options["quiet"],
        checks={**chosen, "reasons": options.get("reasons", {})},
    )


def format_of(asked: str | None, output: Path | None) -> str:
    """The format that is asked for, else the one that the file's suffix says. Raises a usage error where
    neither does."""
    suffix = output.suffix.lower() if output else ""
    if asked is None and suffix not in (*FORMAT_OF_SUFFIX, *PLAIN_SUFFIXES):
        raise click.UsageError(
            f"The format of {output} is not clear from {suffix!r}; give --format "
            f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        )
    return asked or FORMAT_OF_SUFFIX.get(suffix, "text")


def writable(path: Path) -> Path:
    """The path of a file that may be written. Raises `UserError` for another."""
    if not os.access(path.parent, os.W_OK):
        raise UserError(
            f"cannot write {path}: "
            f"{'no permission in its folder' if path.parent.is_dir() else 'no such folder'}"
        )
    return path


def keep_apart(written: dict[str, Path | None], source: Path | None) -> None:
    """Refuse to write two things to one file, or anything over what is read. Raises `UserError`."""
    files = {option: path for option, path in written.items() if path is not None}
    for option, path in files.items():
        if source is not None and same_file(path, source):
            raise UserError(f"{option} would overwrite {path}, which is read; name another file")
    for (one, path), (other, same) in combinations(files.items(), 2):
        if same_file(path, same):
            raise UserError(f"{one} and {other} name one file, {path}; name two")


def own_step_failed(report: Document) -> str | None:
    """Why the job's own training step raised in the trial; None when it did not."""
    from fp8doctor.facts import recorded
    from fp8doctor.facts.arm_names import OWN_STEP_FAILED
    from fp8doctor.facts.no_number import why_of

    if not recorded(report.facts, "trial") or why_of(report.facts.trial) not in OWN_STEP_FAILED:
        return None
    return report.facts.trial.reason


def examine_and_deliver(
    target: str | None, options: dict[str, Any], trace: Path | None = None, **workload: Any
) -> int:
    """Examine in a worker, diagnose, deliver. An incomplete report is printed, and written nowhere."""
    source = Path(target if os.path.exists(target) else target.rpartition(":")[0]) if target else None
    wanted = checked_options(options, source, trace)

    import msgspec

    from fp8doctor.diagnosis.diagnose import diagnose
    from fp8doctor.worker.parent import examine_in_worker

    with progress(wanted.quiet) as say:
        examination = examine_in_worker(target, **workload, progress=say)
    report = diagnose(
        msgspec.structs.replace(examination.facts, assumed_gpu=wanted.assume_gpu), **wanted.checks
    )
    if examination.problem is None:
        deliver(report, wanted)
        if failed := own_step_failed(report):
            complain(failed)
            complain_of_known(failed)
            return FAILED
        if trace and not tell_of_traces(examination.traces, report, wanted):
            return FAILED
        return judged(report, wanted)
    show_report(report, wanted)
    complain(examination.problem)
    complain_of_known(examination.problem)
    return FAILED


def tell_of_traces(traces: dict[str, str | None], report: Document, wanted: ReportOptions) -> bool:
    """Say where the traces are; whether all that were made could be written, and there is one."""
    for file, problem in traces.items():
        if problem:
            complain(f"cannot write {file}: {problem}")
        elif not wanted.quiet:
            complain(f"a trace is in {file}")
    if not traces:
        complain(f"--trace has nothing to keep: {why_no_trace(report)}")
    return bool(traces) and not any(traces.values())


def why_no_trace(report: Document) -> str:
    from fp8doctor.facts import recorded
    from fp8doctor.facts.arm_names import ArmName

    if not recorded(report.facts, "trial"):
        return "there is no GPU to time a step on; --device cpu times it on the CPU"
    trial = report.facts.trial
    gaps = trial.gaps if recorded(trial, "gaps") else {}
    as_is = next((arm.reason for arm in trial.arms if arm.name == ArmName.AS_IS), None)
    return gaps.get("trial.arms.breakdown") or trial.reason or as_is or "no step was profiled"


def replay_and_deliver(saved: Path, options: dict[str, Any]) -> int:
    """Replay a saved report and deliver it."""
    wanted = checked_options(options, saved)

    from fp8doctor.diagnosis.diagnose import replay

    report = replay(saved, assume_gpu=wanted.assume_gpu, **wanted.checks)
    deliver(report, wanted)
    return judged(report, wanted)


def deliver(report: Document, wanted: ReportOptions) -> None:
    """Write the report to where it was asked for. Where one place fails, the other has it."""
    try:
        if wanted.output:
            write_text(wanted.output, rendered(report, wanted))
        else:
            show_report(report, wanted)
    finally:
        if wanted.save:
            write_text(wanted.save, report.to_json())


def judged(report: Document, wanted: ReportOptions) -> int:
    """Hold the report to the gate and say why it is missed; the exit code."""
    return told(wanted.gate.missed(report))


def told(missed: Sequence[str]) -> int:
    """Say why the gate is missed, if it is; the exit code."""
    if missed:
        complain(f"exit {FOUND}: {'; '.join(missed)}")
    return FOUND if missed else OK


def rendered(report: Document, wanted: ReportOptions, **terminal: Any) -> str:
    """The report in the format asked for; ``terminal`` is what `fp8doctor.render.text` should know of one."""
    if wanted.format == "json":
        return report.to_json()
    if wanted.format == "markdown":
        from fp8doctor.render import markdown

        return markdown.render(report)
    if wanted.format == "html":
        from fp8doctor.render import html

        return html.render(report)
    from fp8doctor.render import text

    return text.render(report, verbose=wanted.verbose, quiet=wanted.quiet, **terminal)


def show_report(report: Document, wanted: ReportOptions) -> None:
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns) if sys.stdout.isatty() else WIDEST
    text = rendered(report, wanted, width=width, colour=wants_colour(), ascii=wants_ascii())
    show(text.encode() if wanted.format == "json" else text)
