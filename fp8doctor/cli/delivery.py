"""From options to an exit code: examine or replay, deliver, check the gates.

The command that answers what is open is printed in the words that the user typed, and never saved.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.answer.job import lacks_model, machine_says
from fp8doctor.answer.open_questions import launcher, more_time, timed, with_more_time
from fp8doctor.answer.sentences import box
from fp8doctor.answer.verdict import own_step_failed
from fp8doctor.cli.console import (
    FAILED,
    columns,
    complain,
    complain_of_known,
    complain_of_printed,
    progress,
    show,
    wants_ascii,
    wants_colour,
)
from fp8doctor.cli.gate import Gate
from fp8doctor.cli.options import FORMATS, WORDS
from fp8doctor.diagnosis.diagnose import diagnose, replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.errors import UserError
from fp8doctor.facts.scrub import without_credentials
from fp8doctor.files import same_file, write_text
from fp8doctor.render.build_servers import github, junit
from fp8doctor.render.markup import as_html, as_markdown
from fp8doctor.render.page import Page
from fp8doctor.render.report_page import page
from fp8doctor.render.terminal import to_ascii
from fp8doctor.render.text import as_text
from fp8doctor.wording import plural
from fp8doctor.worker.parent import Examination, Printed

ON_STDOUT = "github"
"""The format that a build server reads on stdout. Files next to it are written by their suffixes; one whose
suffix names no other format is written instead."""

SAVED = "saved"
"""Format of a report that can be shown again."""

BYTES = ("json", "html", "junit")
"""Formats that say which encoding they are in."""

PLAIN_SUFFIXES = ("", ".log", ".out")
"""Suffixes that name no format; text unless another is asked for."""

FORMAT_OF_SUFFIX = {
    **dict.fromkeys((*PLAIN_SUFFIXES, ".txt"), "text"),
    ".json": "json",
    ".md": "markdown",
    ".html": "html",
    ".xml": "junit",
    ".github": "github",
}

Written = Callable[..., str]
"""Writes a result in a format; for text, the terminal's width, ``colour`` and ``ascii`` follow."""


class Output(NamedTuple):
    """Where a result goes."""

    format: str
    """Of stdout: where files are asked for, what is printed when they cannot be written."""
    files: tuple[tuple[Path, str], ...]
    """Each with its format."""

    @property
    def shows(self) -> bool:
        """Return whether the result is printed: to no file, or also for a build server."""
        in_files = {format for _, format in self.files} - {SAVED}
        return not in_files or (self.format == ON_STDOUT and ON_STDOUT not in in_files)

    def write(self, written: Written) -> None:
        """Write the files; the saved report first, since another may fail."""
        for path, format in reversed(self.files):
            write_text(path, written(format))

    def show(self, written: Written) -> None:
        form = {"width": columns(), "colour": wants_colour(), "ascii": wants_ascii()}
        text = written(self.format, **form)
        show(text.encode() if self.format in BYTES else text)

    def deliver(self, made: Callable[[str], Page | str]) -> None:
        """Write what is made for a format, a page or its JSON, to the files; print it without any."""

        def written(format: str, **terminal: Any) -> str:
            return laid_out(made(format), format, **terminal)

        self.write(written)
        if self.files:
            complain(self.told())
        else:
            self.show(written)

    def told(self) -> str:
        return f"wrote {', '.join(str(path) for path, _ in self.files)}"


def checked_output(
    options: dict[str, Any], *sources: Path | None, formats: Sequence[str] = FORMATS
) -> Output:
    """Check where a result of ``sources`` goes, before any work. Raises `UserError` or a usage error.

    A file has the wanted format, else that of its suffix.
    """
    asked, saved = options["format"], options.get("save")
    files: list[tuple[Path, str]] = []
    for path in options["output"]:
        suffix = path.suffix.lower()
        meant = FORMAT_OF_SUFFIX.get(suffix)
        if asked is None and meant not in formats:
            raise click.UsageError(
                f"The format of {path} is not clear from {path.suffix!r}; give --format "
                f"{', '.join(formats[:-1])} or {formats[-1]}."
            )
        by_suffix = asked is None or (asked == ON_STDOUT and suffix not in PLAIN_SUFFIXES)
        files.append((path, meant if by_suffix and meant else asked or "text"))
    format = asked or (files[0][1] if files else "text")
    files += [(saved, SAVED)] if saved else []
    keep_apart([("--save" if format == SAVED else "-o", path) for path, format in files], *sources)
    return Output(format, tuple(files))


def writable(path: Path) -> Path:
    """Return the path of a writable file. Raises `UserError` for another."""
    if not os.access(path.parent, os.W_OK):
        why = "no permission in its folder" if path.parent.is_dir() else "no such folder"
        raise UserError(f"cannot write {path}: {why}")
    return path


def keep_apart(written: Sequence[tuple[str, Path]], *sources: Path | None) -> None:
    """Refuse to write where nothing can be, two outputs to one file, or over an input. Raises `UserError`."""
    for option, path in written:
        writable(path)
        if any(source is not None and same_file(path, source) for source in sources):
            raise UserError(f"{option} would overwrite {path}, which is read; name another file")
    for (one, path), (other, same) in combinations(written, 2):
        if same_file(path, same):
            raise UserError(f"{one} and {other} name one file, {path}; name two")


def laid_out(made: Page | str, format: str, **terminal: Any) -> str:
    """Lay a page out in a format; what is text already stays."""
    if isinstance(made, str):
        return made
    if format == "markdown":
        return as_markdown(made)
    if format == "html":
        return as_html(made)
    return as_text(made, **terminal)


TIMES_NOTHING = ("--no-trial", "--stop", "--stop-on-nan")
"""Flags to drop: ``--stop`` replaces the last two."""

ELSEWHERE = ("--assume-gpu", "--device", "--health", "--every")
"""Options to drop with their values, unless the value names a GPU. A stopped script has no long run."""


class Again(NamedTuple):
    """The command that times the job on a GPU."""

    ours: str
    script: str
    """The script's own words."""


def typed_again(context: click.Context | None) -> Again | None:
    """Write what was typed so that it times the job; None without a job."""
    words = context.meta.get(WORDS) if context else None
    if context is None or not words or (words[0] != "run" and "target" not in context.params):
        return None
    script = context.params["script"] if words[0] == "run" else ()
    options = _that_time(words[1 : len(words) - len(script)])
    command = ["run", "--stop"] if words[0] == "run" else []
    written = (shlex.join(("fp8doctor", *command, *options)), shlex.join(script))
    return Again(*map(without_credentials, written))


def _that_time(words: Sequence[str]) -> Iterator[str]:
    """Drop the options that keep the command from timing copies on a GPU."""
    left = iter(words)
    for word in left:
        name, given, value = word.partition("=")
        if name in ELSEWHERE:
            value = value if given else next(left, "")
            if name == "--device" and not value.startswith("cpu"):
                yield from (name, value)
        elif name not in TIMES_NOTHING:
            yield word


def as_typed(report: Document, again: Again) -> Document:
    """Put the user's own words in place of the commands that were written from facts."""
    facts, added = report.facts, more_time(report.facts)
    begins = launcher(facts)
    typed = {timed(facts): f"{begins}{again.ours} {again.script}".rstrip()}
    if added:
        ours = re.sub(r" --budget[ =]\S+", "", again.ours)
        typed[with_more_time(facts)] = f"{begins}{ours} {added} {again.script}".rstrip()
    opened = [replace(each, command=typed.get(each.command, each.command)) for each in report.answer.open]
    times_it = typed.get(report.answer.times_it, report.answer.times_it)
    return replace(report, answer=replace(report.answer, open=tuple(opened), times_it=times_it))


class Wanted(NamedTuple):
    """The checked options of a command that reports."""

    output: Output
    gate: Gate = Gate()
    assume_gpu: str | None = None
    verbose: bool = False
    quiet: bool = False
    code: Path | None = None
    """The user's file that is looked at."""
    again: Again | None = None
    checks: Mapping[str, Any] = MappingProxyType({})
    """``select``, ``ignore``, ``checks`` and ``reasons`` as `fp8doctor.diagnosis.diagnose` takes them."""


def checked_options(options: dict[str, Any], source: Path | None = None, code: Path | None = None) -> Wanted:
    """Check options before any work begins.

    ``source`` is the file that is read, ``code`` the user's file. Raises `UserError` or a usage error.
    """
    if options["verbose"] and options["quiet"]:
        raise click.UsageError("-v and -q contradict each other.")
    out = checked_output(options, source, options.get("baseline"))
    chosen = {name: options[name] for name in ("select", "ignore", "checks")}
    registry.select(registry.discover(chosen["checks"]), chosen["select"], chosen["ignore"])
    return Wanted(
        output=out,
        gate=Gate.of(options),
        assume_gpu=options["assume_gpu"],
        verbose=options["verbose"],
        quiet=options["quiet"],
        code=code,
        again=typed_again(click.get_current_context(silent=True)),
        checks={**chosen, "reasons": options.get("reasons", {})},
    )


def examine_and_deliver(target: str | None, options: dict[str, Any], **workload: Any) -> int:
    """Examine in a worker, diagnose, deliver; an incomplete report is only printed."""
    source = Path(target if os.path.exists(target) else target.rpartition(":")[0]) if target else None
    wanted = checked_options(options, source, code=source)

    examination, printed = examined(target, quiet=wanted.quiet, **workload)
    facts = replace(examination.facts, assumed_gpu=wanted.assume_gpu)
    report = diagnose(facts, **wanted.checks)
    failed = examination.problem or (facts.trial.reason if own_step_failed(facts) else None)
    if examination.problem is None:
        deliver(report, wanted)
    else:
        wanted.output.show(writer(report, wanted))
    whole = failed is not None or printed.failed
    if whole or wanted.verbose:
        complain_of_printed(printed, whole=whole)
    if failed is not None:
        complain(failed)
        complain_of_known(failed)
        return FAILED
    return wanted.gate.judged(report)


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
    return wanted.gate.judged(report)


def deliver(report: Document, wanted: Wanted) -> None:
    """Write the report to all its places, and say on stderr where it is."""
    out, written = wanted.output, writer(report, wanted)
    out.write(written)
    if out.shows:
        out.show(written)
    if out.format == ON_STDOUT:
        add_step_summary(written)
    if out.files and not wanted.quiet:
        if not out.shows or out.format != "text":
            complain(in_a_line(report))
        complain(out.told())


def deliver_early(report: Document, wanted: Wanted, steps: int) -> None:
    """Write the files after some steps of a script, and say so in one line."""
    out = wanted.output
    out.write(writer(report, wanted))
    follows = "The report follows when the script ends"
    if out.files:
        follows = f"W{out.told()[1:]} after {plural(steps, 'step')}; completed when the script ends"
    if not wanted.quiet:
        complain(f"{in_a_line(report)}. {follows}")


def in_a_line(report: Document) -> str:
    """Write the verdict, or what a machine without a model can do."""
    no_model = lacks_model(report)
    verdict = machine_says(report)[1] if no_model else box(report.answer).headline
    return to_ascii(verdict) if wants_ascii() else verdict


def add_step_summary(written: Written) -> None:
    """Append the report to the step's summary in a GitHub workflow."""
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with open(file, "a", encoding="utf-8") as summary:
                summary.write(f"{written('markdown')}\n")
        except OSError as error:
            complain(f"cannot write to $GITHUB_STEP_SUMMARY: {error.strerror or error}")


def writer(report: Document, wanted: Wanted) -> Written:
    """Return what writes the report in a format."""

    def written(format: str, **terminal: Any) -> str:
        if format in (SAVED, "json"):
            return report.to_json(facts=format == SAVED or lacks_model(report))
        if format in ("github", "junit"):
            code = wanted.code.absolute() if wanted.code and wanted.code.is_file() else None
            here = Path.cwd() if code else Path()
            file = code.relative_to(here).as_posix() if code and code.is_relative_to(here) else ""
            if format == "junit":
                return junit(report, fail_on=wanted.gate.fail_on, file=file)
            return github(report, file=file)
        quiet = wanted.quiet and format == "text"
        on_screen = terminal and format == "text"
        made = page(as_typed(report, wanted.again) if on_screen and wanted.again else report, quiet=quiet)
        return laid_out(made, format, verbose=wanted.verbose and not quiet, **terminal)

    return written
