"""From options to an exit code: examine or replay, deliver, check the gates."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from fp8doctor import registry
from fp8doctor.answer import machine
from fp8doctor.answer.commands import launcher, more_time, timed, with_more_time
from fp8doctor.answer.sentences import box
from fp8doctor.answer.verdict import own_step_failed
from fp8doctor.cli.arguments import typed_again
from fp8doctor.cli.console import (
    FAILED,
    FOUND,
    OK,
    columns,
    complain,
    complain_of_known,
    complain_of_printed,
    progress,
    show,
    wants_ascii,
    wants_colour,
)
from fp8doctor.cli.gate import Gate, is_same_job
from fp8doctor.cli.options import FORMATS
from fp8doctor.diagnosis.diagnose import diagnose, replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.files import same_file, write_text
from fp8doctor.render.page import Page
from fp8doctor.render.report_page import page
from fp8doctor.render.terminal import to_ascii
from fp8doctor.render.text import as_text
from fp8doctor.wording import plural
from fp8doctor.worker.printed import Printed

if TYPE_CHECKING:
    from fp8doctor.worker.parent import Examination

ON_STDOUT = "github"
"""The format that a build server reads on stdout. Files next to it are written by their suffixes; one whose
suffix names no other format is written instead."""

BYTES = ("json", "html", "junit")
"""Formats that say which encoding they are in."""

FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".json": "json",
    ".md": "markdown",
    ".html": "html",
    ".xml": "junit",
    ".github": "github",
}

PLAIN_SUFFIXES = ("", ".log", ".out")


class ReportOptions(NamedTuple):
    """The checked options of a command."""

    format: str
    """Of stdout: where files are asked for, what is printed when they cannot be written."""
    outputs: tuple[tuple[Path, str], ...]
    """Files, each with its format."""
    code: Path | None
    """The user's file that is looked at."""
    save: Path | None
    gate: Gate
    assume_gpu: str | None
    verbose: bool
    quiet: bool
    again: tuple[str, str]
    """The words that the user typed, with a trial; empty if no job was named. Printed, never saved."""
    checks: dict[str, Any]
    """``select``, ``ignore``, ``checks`` and ``reasons`` as `fp8doctor.diagnosis.diagnose` takes them."""

    @property
    def shows(self) -> bool:
        """Return whether the report is printed: to no file, or also for a build server."""
        in_files = {format for _, format in self.outputs}
        return not in_files or (self.format == ON_STDOUT and ON_STDOUT not in in_files)

    @property
    def files(self) -> str:
        """Name the files to write, in a list; empty without one."""
        paths = (*(path for path, _ in self.outputs), self.save)
        return ", ".join(str(path) for path in paths if path)


def checked_options(
    options: dict[str, Any], source: Path | None = None, code: Path | None = None
) -> ReportOptions:
    """Check options before any work begins.

    ``source`` is the file that is read, ``code`` the user's file. Raises `UserError` or a usage error.
    """
    if options["verbose"] and options["quiet"]:
        raise click.UsageError("-v and -q contradict each other.")
    outputs, save = options["output"], options["save"]
    for path in (*outputs, save):
        if path is not None:
            writable(path)
    written = [*(("-o", path) for path in outputs), ("--save", save)]
    keep_apart(written, source)
    keep_apart(written, options.get("baseline"))
    asked = options["format"]
    formats = [format_of(asked, path) for path in outputs]
    chosen = {name: options[name] for name in ("select", "ignore", "checks")}
    registry.select(registry.discover(chosen["checks"]), chosen["select"], chosen["ignore"])
    return ReportOptions(
        format=asked or (formats[0] if formats else "text"),
        outputs=tuple(zip(outputs, formats, strict=True)),
        code=code,
        save=save,
        gate=Gate.of(options),
        assume_gpu=options["assume_gpu"],
        verbose=options["verbose"],
        quiet=options["quiet"],
        again=typed_again(click.get_current_context(silent=True)),
        checks={**chosen, "reasons": options.get("reasons", {})},
    )


def format_of(asked: str | None, output: Path | None, formats: Sequence[str] = FORMATS) -> str:
    """Return the wanted format, else that of the file's suffix. Raises a usage error without either."""
    suffix = output.suffix.lower() if output else ""
    meant = "text" if suffix in PLAIN_SUFFIXES else FORMAT_OF_SUFFIX.get(suffix)
    if asked is None and meant not in formats:
        raise click.UsageError(
            f"The format of {output} is not clear from {suffix!r}; give --format "
            f"{', '.join(formats[:-1])} or {formats[-1]}."
        )
    if asked == ON_STDOUT:
        return FORMAT_OF_SUFFIX.get(suffix, asked)
    return asked or meant or "text"


def writable(path: Path) -> Path:
    """Return the path of a writable file. Raises `UserError` for another."""
    if not os.access(path.parent, os.W_OK):
        raise UserError(
            f"cannot write {path}: "
            f"{'no permission in its folder' if path.parent.is_dir() else 'no such folder'}"
        )
    return path


def keep_apart(written: Iterable[tuple[str, Path | None]], source: Path | None) -> None:
    """Refuse to write two outputs to one file, or over an input. Raises `UserError`."""
    files = [(option, path) for option, path in written if path is not None]
    for option, path in files:
        if source is not None and same_file(path, source):
            raise UserError(f"{option} would overwrite {path}, which is read; name another file")
    for (one, path), (other, same) in combinations(files, 2):
        if same_file(path, same):
            raise UserError(f"{one} and {other} name one file, {path}; name two")


def examine_and_deliver(target: str | None, options: dict[str, Any], **workload: Any) -> int:
    """Examine in a worker, diagnose, deliver; an incomplete report is only printed."""
    source = Path(target if os.path.exists(target) else target.rpartition(":")[0]) if target else None
    wanted = checked_options(options, source, code=source)

    examination, printed = examined(target, quiet=wanted.quiet, **workload)
    report = diagnose(
        msgspec.structs.replace(examination.facts, assumed_gpu=wanted.assume_gpu), **wanted.checks
    )
    raised = report.facts.trial.reason if own_step_failed(report.facts) else None
    failed = examination.problem or raised
    if examination.problem is None:
        deliver(report, wanted)
    else:
        show_report(report, wanted)
    whole = failed is not None or printed.failed
    if whole or wanted.verbose:
        complain_of_printed(printed, whole=whole)
    if failed is not None:
        complain(failed)
        complain_of_known(failed)
        return FAILED
    return judged(report, wanted)


def examined(target: str | None, *, quiet: bool = False, **workload: Any) -> tuple[Examination, Printed]:
    """Examine in a worker and show its progress; what it printed is shown if that fails."""
    from fp8doctor.worker.parent import examine_in_worker

    printed = Printed()
    try:
        with progress(quiet) as say:
            return examine_in_worker(target, **workload, progress=say, printed=printed), printed
    except BaseException:
        complain_of_printed(printed, whole=True)
        raise


def replay_and_deliver(saved: Path, options: dict[str, Any]) -> int:
    wanted = checked_options(options, saved)

    report = replay(saved, assume_gpu=wanted.assume_gpu, **wanted.checks)
    deliver(report, wanted)
    return judged(report, wanted)


def deliver(report: Document, wanted: ReportOptions) -> None:
    """Write the report to all its places, and say on stderr where it is."""
    write_files(report, wanted)
    if wanted.shows:
        show_report(report, wanted)
    if wanted.format == ON_STDOUT:
        add_step_summary(report)
    if wanted.files and not wanted.quiet:
        if not wanted.shows or wanted.format != "text":
            complain(in_a_line(report))
        complain(f"wrote {wanted.files}")


def deliver_early(report: Document, wanted: ReportOptions, steps: int) -> None:
    """Write the files after some steps of a script, and say so in one line."""
    write_files(report, wanted)
    if wanted.quiet:
        return
    follows = "The report follows when the script ends"
    if wanted.files:
        follows = f"Wrote {wanted.files} after {plural(steps, 'step')}; completed when the script ends"
    complain(f"{in_a_line(report)}. {follows}")


def write_files(report: Document, wanted: ReportOptions) -> None:
    """Write the files; if one cannot be written, the saved report still is."""
    try:
        for path, format in wanted.outputs:
            write_text(path, rendered(report, wanted, format))
    finally:
        if wanted.save:
            write_text(wanted.save, report.to_json())


def in_a_line(report: Document) -> str:
    """Write the verdict, or what a machine without a model can do."""
    no_model = machine.no_model(report)
    verdict = machine.says(report)[1] if no_model else box(report.answer).headline
    return to_ascii(verdict) if wants_ascii() else verdict


def judged(report: Document, wanted: ReportOptions) -> int:
    """Hold the report to the gate and say why it is missed; the exit code."""
    baseline = wanted.gate.baseline
    if baseline and not is_same_job(baseline.facts, report.facts, baseline.name):
        return FAILED
    return exit_code(wanted.gate.missed(report))


def exit_code(missed: Iterable[str]) -> int:
    """Say why the gate is missed, if it is, a line for each reason; the exit code."""
    code = OK
    for why in missed:
        complain(f"exit code {FOUND}: {why}")
        code = FOUND
    return code


def add_step_summary(report: Document) -> None:
    """Append the report to the step's summary in a GitHub workflow."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        return
    from fp8doctor.render import markdown

    try:
        with open(file, "a", encoding="utf-8") as summary:
            summary.write(f"{markdown.render(report)}\n")
    except OSError as error:
        complain(f"cannot write to $GITHUB_STEP_SUMMARY: {error.strerror or error}")


def rendered(report: Document, wanted: ReportOptions, format: str, **terminal: Any) -> str:
    """Write the report in a format; ``terminal`` holds options for text."""
    if format in ("github", "junit"):
        return for_build_server(report, wanted, format)
    if format == "json":
        return report.to_json(facts=machine.no_model(report))
    quiet = wanted.quiet and format == "text"
    return laid_out(page(report, quiet=quiet), format, verbose=wanted.verbose and not quiet, **terminal)


def laid_out(page: Page | str, format: str, **terminal: Any) -> str:
    """Lay a page out in a format; JSON is written already."""
    if isinstance(page, str):
        return page
    if format == "markdown":
        from fp8doctor.render.markdown import as_markdown

        return as_markdown(page)
    if format == "html":
        from fp8doctor.render.html import as_html

        return as_html(page)
    return as_text(page, **terminal)


def terminal() -> dict[str, Any]:
    """Return the options of text for stdout as it is."""
    return {"width": columns(), "colour": wants_colour(), "ascii": wants_ascii()}


def show_in(format: str, text: str) -> None:
    """Print a report or a page; the formats that name their encoding keep it."""
    show(text.encode() if format in BYTES else text)


def for_build_server(report: Document, wanted: ReportOptions, format: str) -> str:
    """Write annotations or test cases, at the user's file if it is here."""
    from fp8doctor.render.build_servers import github, junit

    here = Path.cwd()
    absolute = wanted.code.absolute() if wanted.code and wanted.code.is_file() else None
    file = absolute.relative_to(here).as_posix() if absolute and absolute.is_relative_to(here) else ""
    if format == "junit":
        return junit(report, fail_on=wanted.gate.fail_on, file=file)
    return github(report, file=file)


def as_typed(command: str, facts: Facts, again: tuple[str, str]) -> str:
    """Put the user's own words in place of a command that was written from facts."""
    options = {timed(facts): "", with_more_time(facts): more_time(facts)}
    if not command or command not in options:
        return command
    ours, script = again
    ours = re.sub(r" --budget[ =]\S+", "", ours) if options[command] else ours
    return launcher(facts) + " ".join(filter(None, (ours, options[command], script)))


def show_report(report: Document, wanted: ReportOptions) -> None:
    """Print the report; as text it names the command that the user typed."""
    if wanted.format == "text" and wanted.again[0] and report.answer:
        opened = tuple(
            msgspec.structs.replace(each, command=as_typed(each.command, report.facts, wanted.again))
            for each in report.answer.open
        )
        report = msgspec.structs.replace(report, answer=msgspec.structs.replace(report.answer, open=opened))
    show_in(wanted.format, rendered(report, wanted, wanted.format, **terminal()))
