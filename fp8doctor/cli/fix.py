"""The command ``fix``: the plan of a report as a patch of a training script."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from fp8doctor.answer.verdict import GRAVE
from fp8doctor.cli.console import FOUND, OK, complain, show
from fp8doctor.cli.delivery import writable
from fp8doctor.cli.options import READ, option
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.two_reports import compared, timed_step
from fp8doctor.errors import UserError
from fp8doctor.files import digest, regular, write_text
from fp8doctor.patching import Placed, Script, placed


@click.command(
    epilog="Exit codes: 0 shown or applied, 1 not applied because it did not help, 2 no report or no script.",
    params=[
        click.Argument(["script"], type=READ),
        click.Argument(["arguments"], nargs=-1, metavar="[-- ARGS]..."),
        option(
            "--report",
            "saved",
            takes="FILE",
            type=READ,
            help="Use the plan of a report that 'fp8doctor run --save FILE' wrote, instead of a run now.",
        ),
        option("--apply", help="Time the script with and without the fixes, and keep what helps."),
    ],
)
def fix(script: Path, arguments: Sequence[str], *, saved: Path | None, apply: bool) -> int:
    """Show the plan of a report as a diff of a training script.

    Nothing is changed without --apply. ARGS are the script's own, for the runs.
    """
    backup = script.with_name(f"{script.name}.orig")
    content = _content(script, backup if apply else None)
    source = Script(content, script.name)
    report = replay(saved) if saved else _watched(script, arguments)
    if (of := report.facts.get("target.name")) != script.name:
        raise UserError(f"the report is of {of or 'another job'}, not of {script.name}")
    if report.facts.get("target.kind") != "script":
        raise UserError(
            "the report is of no script that trains, and 'fp8doctor fix' changes only those: edit"
            f" {script} by the lines that the report prints"
        )
    if report.facts.get("target.digest") != digest(content):
        raise UserError(f"{script} has changed since the report; run it again: fp8doctor fix {script}")
    found = placed(report.prescription, source)
    fixed = source.edited([each.edit for each in found if each.edit])
    show("".join(_page(found, script, source.text, fixed)))
    if not apply or fixed == source.text:
        return FOUND if apply and found else OK
    if why := _no_help(script, arguments, fixed):
        complain(f"{script} is unchanged: {why}")
        return FOUND
    if _content(script, backup) != content:
        raise UserError(
            f"{script} was edited while fp8doctor ran, so it stays as it is; run fp8doctor fix {script} again"
        )
    shutil.copy2(script, backup)
    write_text(script, fixed)
    complain(f"wrote {script}; {backup} is the script as it was")
    return OK


def _content(script: Path, backup: Path | None) -> bytes:
    """Read the script. Raises `UserError` if it cannot be read, or not be written with a backup."""
    try:
        regular(script)
        content = script.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {script}: {error.strerror or error}") from None
    if backup and not (writable(script).stat().st_mode & 0o222 and os.access(script, os.W_OK)):
        raise UserError(f"cannot write {script}: it is read-only")
    if backup and backup.exists():
        raise UserError(f"{backup} exists, and would be overwritten; move it away first")
    return content


def _watched(script: Path, arguments: Sequence[str], *options: str, of: str = "") -> Document:
    """Run the script up to its timed steps. Raises `UserError` if that gives no report."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        report, screen = Path(folder, "report.json"), str(Path(folder, "screen.txt"))
        files = ("--save", str(report), "-o", screen)
        run = ("run", "--stop", *options, "-q", "--fail-on", "error", *files)
        words = (*run, str(script), *arguments)  # with a gate, fp8doctor waits until the report is whole
        complain(f"running {script}{of} until its steps are timed")
        ended = subprocess.run([sys.executable, "-m", "fp8doctor", *words], stdout=2, check=False)
        if report.exists():
            return replay(report)
    raise UserError(f"{script}{of} gave no report (exit code {ended.returncode}); see its output above")


def _no_help(script: Path, arguments: Sequence[str], fixed: str) -> str | None:
    """Run the script, then a copy with the fixes; say why they do not help, if so."""
    before = _watched(script, arguments, "--no-trial")
    step = timed_step(before.facts, script.name)
    if not step.step_ms or step.on_cpu:
        why = step.missing or "there is no GPU here"
        raise UserError(f"{script} is unchanged: the fixes cannot be timed ({why})")
    copy = script.with_name(f"fp8doctor_{os.urandom(4).hex()}_{script.name}")
    write_text(copy, fixed)
    try:
        after = _watched(copy, arguments, "--no-trial", of=" with the fixes")
    except UserError as error:
        return str(error)
    finally:
        copy.unlink()
    if after.verdict.status in GRAVE or before.verdict.status in GRAVE:
        return after.verdict.summary if after.verdict.status in GRAVE else None
    found = compared(before, after, ("as it was", "with the fixes"))
    complain(found.summary)
    is_faster = found.speedup is not None and found.speedup.low > 1
    return None if is_faster else "with the fixes its step is not faster beyond noise"


def _page(found: Sequence[Placed], script: Path, old: str, new: str) -> Iterator[str]:
    """Say of each fix whether the diff has it, with the lines to write by hand; then the diff."""
    import difflib

    if not found:
        yield "The report has no fix.\n"
    for number, (step, edit, reason) in enumerate(found, 1):
        code = f" ({step.code})" if step.code else ""
        where = "in the diff below" if edit else f"write it yourself, because {reason}"
        yield f"Fix {number}{code}, {step.treatment.summary}: {where}.\n"
        if not edit:
            yield "".join(f"    {line}\n" for line in step.treatment.code.splitlines())
    name = script.as_posix().removeprefix("/")
    lines, fixed = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for line in difflib.unified_diff(lines, fixed, f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
