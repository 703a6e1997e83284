"""The command ``fix``: the plan of a report as a patch of a training script, which is read and never run."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from fp8doctor.answer.verdict import GRAVE
from fp8doctor.cli.console import FOUND, OK, complain, show
from fp8doctor.cli.delivery import writable
from fp8doctor.cli.options import READ, option
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.two_reports import compared, timed_step
from fp8doctor.errors import UserError
from fp8doctor.files import digest, regular, write_text
from fp8doctor.finding import Treatment


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


MORE_TO_DO = re.compile(r"# *(leave out|and |in the shell|build |or[:,] ).*|\baccelerator\b")
"""Comments of a fix that ask for more than its lines, or for a choice; and what stands before the model."""
COMPILES = re.compile(r"(?<!\bre)\.compile\b|\btorch_compile\b")
"""Words of a script that may compile its model."""
CONVERTS = re.compile(r"\b(convert_to_float8_training|quantize_|convert_model)\(")
"""Calls of a script that may convert its model."""
OPTIMIZER = re.compile(r"optim|adam|sgd|adagrad|lion|muon|shampoo|Trainer$", re.IGNORECASE)
"""Names of what trains a model."""
WRAPPERS = ("prepare", "prepare_model", "setup", "DDP", "DistributedDataParallel", "FSDP", "get_peft_model")
"""Functions that give the model back wrapped, so its layers have other names."""

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
LOOPS = (ast.For, ast.While)
IMPORTS = (ast.Import, ast.ImportFrom)


class NotPlacedError(Exception):
    """A fix has no certain place in the script. The message says why."""


class Edit(NamedTuple):
    """Lines to insert before a line, counted from 0."""

    line: int
    text: str


class Placed(NamedTuple):
    """A fix with its edit, or with the reason why it has none."""

    step: Step
    edit: Edit | None = None
    reason: str = ""


class Script:
    """A parsed script. Raises `UserError` if it is not Python."""

    def __init__(self, content: bytes, name: str = "script") -> None:
        try:
            self.text = content.decode()
            tree = parsed(self.text, name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"cannot read {name} as Python in UTF-8: {error}") from None
        self.lines = [each.encode() for each in io.StringIO(self.text, newline="")]
        self.newline = "\r\n" if self.text.partition("\n")[0].endswith("\r") else "\n"
        nodes = [*ast.walk(tree)]
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.calls = [each for each in nodes if isinstance(each, ast.Call)]
        aliases = (alias for each in nodes if isinstance(each, IMPORTS) for alias in each.names)
        self.imported = {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        self.taken = self.imported.union(each.id for each in nodes if isinstance(each, ast.Name))

    def around(self, node: ast.AST) -> list[ast.AST]:
        """List the nodes around one, from the inside, up to its function, class or module."""
        found = [node]
        while not isinstance(found[-1], SCOPES):
            found.append(self.parents[found[-1]])
        return found

    def insert(self, at: ast.stmt, lines: Sequence[str], *, after: bool = False) -> Edit:
        """Insert lines before or after a statement, at its indentation."""
        first, last = at.lineno - 1, (at.end_lineno or 0) - 1
        blanks = self.lines[first][: at.col_offset].decode()
        rest = self.lines[last][at.end_col_offset :].strip()
        if blanks.strip() or (after and rest and not rest.startswith(b"#")):
            raise NotPlacedError(f"line {at.lineno} holds several statements")
        unit = "\t" if "\t" in blanks else "    "
        text = "".join(f"{blanks}{each.replace('    ', unit)}{self.newline}" for each in lines)
        return Edit(last + 1 if after else first, text)

    def edited(self, edits: Sequence[Edit]) -> str:
        """Return the text with these edits. Raises `NotPlacedError` if they give no Python."""
        lines = [each.decode() for each in self.lines]
        if not self.text.endswith(("\n", "\r")) and any(edit.line == len(lines) for edit in edits):
            lines[-1] += self.newline
        for edit in sorted(edits, key=lambda each: each.line)[::-1]:
            lines.insert(edit.line, edit.text)
        text = "".join(lines)
        try:
            parsed(text)
        except (SyntaxError, ValueError):
            raise NotPlacedError("its form is unusual") from None
        return text


def parsed(text: str, name: str = "script") -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(text, name)


def placed(steps: Sequence[Step], script: Script) -> list[Placed]:
    """Place each fix of a plan in turn, next to those before it."""
    found: list[Placed] = []
    for step in steps:
        try:
            edit = _edit(step.treatment, script)
            script.edited([*(each.edit for each in found if each.edit), edit])
            found.append(Placed(step, edit))
        except NotPlacedError as error:
            found.append(Placed(step, reason=str(error)))
    return found


def _edit(treatment: Treatment, script: Script) -> Edit:
    """Insert a fix where the script's only model is built and wrapped, and not yet trained."""
    placeable = treatment.kind == "python" and treatment.name.startswith(("compile-", "convert-"))
    if not placeable or MORE_TO_DO.search(treatment.code):
        raise NotPlacedError("fp8doctor does not place a fix of this kind")
    converts = treatment.name.startswith("convert-")
    for what, pattern in [("compiles", COMPILES), ("converts", CONVERTS)][: 1 + converts]:
        if found := pattern.search(script.text):
            line = script.text.count("\n", 0, found.start()) + 1
            raise NotPlacedError(f"line {line} {what} already, perhaps not always")
    models: dict[tuple[ast.AST, str], list[ast.AST]] = {}
    for name, use in _trained(script):
        models.setdefault((script.around(use)[-1], name), []).append(use)
    if len(models) != 1:
        raise NotPlacedError("several models are trained" if models else "no line trains one, but in a loop")
    ((_, model), uses) = next(iter(models.items()))
    anchor, after = _place_of(model, uses[-1], script)
    return script.insert(anchor, _lines(ast.parse(treatment.code).body, script, model), after=after)


def _lines(fix: Sequence[ast.stmt], script: Script, model: str) -> list[str]:
    """Write statements of a fix, and imports that they use and the script lacks.

    Its variables get names of their own if the script has them too.
    """
    code = [each for each in fix if not isinstance(each, IMPORTS)]
    variables = [node for each in code for node in ast.walk(each) if isinstance(node, ast.Name)]
    lacks = {each.id for each in variables} - script.imported
    lines = ["import torch"] if "torch" in lacks else []
    for each in fix:
        if isinstance(each, IMPORTS):
            each.names = [alias for alias in each.names if (alias.asname or alias.name) in lacks - {"torch"}]
            lines += [ast.unparse(each)] if each.names else []
    bound = {each.id for each in variables if isinstance(each.ctx, ast.Store)}
    renamed = {each: f"fp8_{each}" for each in bound & script.taken} | {"model": model}
    for variable in variables:
        variable.id = renamed.get(variable.id, variable.id)
    return lines + [line for statement in code for line in ast.unparse(statement).splitlines()]


def _trained(script: Script) -> Iterator[tuple[str, ast.Call]]:
    """Name the variables whose parameters are read next to an optimizer, or that a Trainer gets."""
    optimize = {script.around(each)[-1] for each in script.calls if OPTIMIZER.search(_name(each))}
    for call in script.calls:
        around = script.around(call)
        if around[-1] not in optimize or any(isinstance(each, LOOPS) for each in around):
            continue
        given = []
        if _name(call).endswith("Trainer"):
            given = [each.value for each in call.keywords if each.arg == "model"] or call.args[:1]
        elif _name(call) in ("parameters", "named_parameters", "configure_optimizers"):
            given = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        yield from ((each.id, call) for each in given if isinstance(each, ast.Name))


def _place_of(model: str, use: ast.AST, script: Script) -> tuple[ast.stmt, bool]:
    """Return the statement to insert at, and whether after it: after the last that wraps the model."""
    statement = next(each for each in script.around(use) if isinstance(each, ast.stmt))
    fields = (each for _, each in ast.iter_fields(script.parents[statement]) if isinstance(each, list))
    block = next(each for each in fields if statement in each)
    place = statement, False
    for each in block[block.index(statement) :]:
        if isinstance(each, LOOPS):
            break
        names = [name for name in ast.walk(each) if isinstance(name, ast.Name) and name.id == model]
        if {type(name.ctx) for name in names} >= {ast.Load, ast.Store}:
            if not any(_name(call) in WRAPPERS for call in ast.walk(each) if isinstance(call, ast.Call)):
                raise NotPlacedError(f"line {each.lineno} may wrap {model}")
            place = each, True
    return place


def _name(node: ast.expr) -> str:
    """Return the last name of a call, attribute or variable; empty for others."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
