"""Random command lines: an exit code of the contract, a sentence, and no traceback."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner

from fp8doctor import cli
from fp8doctor.cli import run
from fp8doctor.cli.console import FAILED, FOUND, OK
from fp8doctor.facts import Facts
from fp8doctor.running.script_messages import ScriptState
from fp8doctor.stages import Doing
from research.reliability.count import Count
from tests.facts_of import DECODER_468M
from tests.profiling.composed import Composed
from tests.recordings import text_of

RECORDED = Path(__file__).parents[2] / "tests" / "patients" / "recorded"

COMMANDS = ("", "env", "report", "demo", "list", "explain", "help", "run", "trace", "compare")

WORDS = (
    "model.py",
    "model.py:build_model",
    "saved.json",
    "torn.json",
    "profiled.json",
    "nowhere.py",
    "folder",
    "pkg.module:attr",
    "CMP001",
    "cmp001",
    "eager-float8",
    "NONE",
    "--",
    "-",
    "",
    " ",
    "ß\x1b[31m",
    "/dev/null",
    "x" * 5_000,
)

OPTIONS: dict[str, tuple[str, ...]] = {
    "--format": ("text", "json", "markdown", "html", ""),
    "-o": (
        "out.txt",
        "out.json",
        "out.md",
        "out.html",
        "folder",
        "nowhere/out.txt",
        "saved.json",
        "profiled.json",
        "/dev/full",
        "",
    ),
    "--save": ("kept.json", "folder", "model.py", "nowhere/kept.json", "/dev/full", ""),
    "--select": ("CMP", "cmp001,MOD", "NOPE", ",", ""),
    "--ignore": ("CMP", "STP,MEM", "NOPE", ""),
    "--fail-on": ("never", "info", "warning", "error", "sometimes"),
    "--assume-gpu": ("h100", "B200", "H300", ""),
    "--checks": ("folder", "nowhere", "bad", ""),
    "--batch": ("1", "0", "-1", "many", "9" * 30),
    "--seq": ("8", "0", "1.5"),
    "--layers": ("2", "0", "x"),
    "--load-timeout": ("1", "0", "nan", "inf", "1e999"),
    "--budget": ("0.5", "0", "-1", "soon"),
    "--device": ("cpu", "cuda:9", "", "tpu"),
    "--min-speedup": ("1.1", "0", "nan", "fast"),
}

FLAGS = (
    "-v",
    "-q",
    "--verbose",
    "--quiet",
    "--no-trial",
    "--strict",
    "--help",
    "--version",
    "-vq",
    "-h",
    "--bogus",
)


def command_line(how: random.Random) -> list[str]:
    """Words and options in any order."""
    words = [how.choice(COMMANDS)] if how.random() < 0.8 else []
    words += how.choices(WORDS, k=how.choice((0, 1, 1, 1, 2)))
    parts: list[list[str]] = [[word] for word in words if word or how.random() < 0.2]
    for _ in range(how.choice((0, 0, 1, 1, 2, 3, 6))):
        if how.random() < 0.3:
            parts.append([how.choice(FLAGS)])
            continue
        option = how.choice(list(OPTIONS))
        value = how.choice(OPTIONS[option])
        joined = option.startswith("--") and how.random() < 0.3
        parts.append([f"{option}={value}"] if joined else [option, value][: 1 if how.random() < 0.05 else 2])
    how.shuffle(parts)
    return [each for part in parts for each in part]


@contextmanager
def a_folder_of_files(folder: Path) -> Iterator[None]:
    """The current folder with what the words name."""
    (folder / "folder").mkdir()
    (folder / "bad").mkdir()
    (folder / "bad" / "check.py").write_text("raise RuntimeError('mine')")
    (folder / "model.py").write_text(MODEL)
    saved = text_of(RECORDED / "h200-mlp.json.gz")
    (folder / "saved.json").write_text(saved, "utf-8")
    (folder / "torn.json").write_text(saved[:500], "utf-8")
    profiled = Composed()
    profiled.kernel("nvjet_sm90_qqtst_1", 100, 200, launched=90)
    profiled.write(folder, "profiled.json")
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


MODEL = "raise AssertionError('run')"
KEPT = ("model.py", "saved.json", "torn.json", "profiled.json")
"""Files that no command may change."""


@contextmanager
def a_worker_that_knows() -> Iterator[None]:
    """In place of the worker's process: one that has examined already, or could not."""
    answers = random.Random(0)

    def examine_in_worker(target: str | None, *, progress: Any, **options: Any) -> SimpleNamespace:
        progress(Doing("loading"))
        problem = answers.choice((None, None, None, "the worker was killed by SIGKILL (out of memory?)"))
        return SimpleNamespace(facts=Facts() if problem else DECODER_468M, problem=problem, traces={})

    name, before = "fp8doctor.worker.parent", sys.modules.get("fp8doctor.worker.parent")
    sys.modules[name] = SimpleNamespace(examine_in_worker=examine_in_worker)  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def a_script_that_ended() -> Iterator[None]:
    """In place of the script that this process would become: one that was examined already, or never
    trained."""
    answers = random.Random(0)

    def ended(*_: Any, report: Callable[[ScriptState], int], **__: Any) -> int:
        return report(ScriptState(facts=answers.choice((None, DECODER_468M)), torch=True, ended=True))

    before = run.run_script
    run.run_script = ended
    try:
        yield
    finally:
        run.run_script = before


def command_lines(tries: int, folder: Path, seed: int = 0) -> Count:
    """So many command lines, in this process."""
    count, how = Count("a random command line"), random.Random(seed)
    with a_folder_of_files(folder), a_worker_that_knows(), a_script_that_ended():
        kept = {name: (folder / name).read_bytes() for name in KEPT}
        for _ in range(tries):
            args = command_line(how)
            with count.attempt(" ".join(repr(each[:40]) for each in args)) as why:
                why += wrong_with(args)
                changed = [name for name, held in kept.items() if (folder / name).read_bytes() != held]
                why += [f"{name} changed" for name in changed if not is_output_alone(name, args)]
                for name in changed:
                    (folder / name).write_bytes(kept[name])
    return count


def is_output_alone(name: str, args: list[str]) -> bool:
    """Whether a command names a file as what it writes, and never as what it reads."""
    named = {before for before, each in pairwise(["", *args]) if each.partition(":")[0] == name}
    named |= {each.removesuffix(f"={name}") for each in args if each.endswith(f"={name}")}
    return bool(named) and named <= {"-o", "--save"}


def wrong_with(args: list[str]) -> list[str]:
    """What one command line does that it should not."""
    done = CliRunner().invoke(cli.main, args)
    said = done.stdout + done.stderr
    why = [] if done.exit_code in (OK, FOUND, FAILED) else [f"exit code {done.exit_code}"]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        why.append(f"it raises {type(done.exception).__name__}: {done.exception}")
    if "Traceback" in said or "internal error" in said:
        why.append(done.stderr)
    if done.exit_code == FAILED and not done.stderr and not done.stdout:
        why.append("it fails without a word")
    return why
