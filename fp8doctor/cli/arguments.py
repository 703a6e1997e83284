"""A command line as words: find the target, and write the command again."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from fp8doctor.files import same_file

TYPED = "fp8doctor.typed"
"""Key in click's context: the words after ``fp8doctor``, as typed."""

ORDERED = "fp8doctor.ordered"
"""Key: the same words with the command first; an empty word means examining a target."""

SCRIPT = "script"
"""Key: the script's words in ``run``."""

TIMES_NOTHING = ("--no-trial", "--trial", "--stop", "--stop-on-nan")
"""Flags to drop: ``--stop`` replaces the last three."""

WRAPPERS = ("timeout", "nohup", "nice", "time")
"""Programs that start a command and are no part of it: a limit would end the longer one."""

ELSEWHERE = ("--assume-gpu", "--device", "--health", "--every")
"""Options to drop with their values, unless the value names a GPU. A stopped script has no long run."""


def typed_again(context: click.Context | None) -> str:
    """Write the command that times the same job on a GPU; empty if no job was named."""
    words = context.meta.get(ORDERED) if context else None
    if context is None or not words or (words[0] != "run" and "target" not in context.params):
        return ""
    script = context.meta.get(SCRIPT, []) if words[0] == "run" else []
    options = _that_time(words[1 : len(words) - len(script)])
    command = ["run", "--stop"] if words[0] == "run" else []
    from fp8doctor.facts.secrets import without_credentials

    started = started_by(context.meta[TYPED])
    return without_credentials(shlex.join([*started, *command, *options, *script]))


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


def started_by(typed: Sequence[str]) -> list[str]:
    """Find how fp8doctor was started, for example by ``accelerate launch``.

    A launcher's command line ends with the command line of the process that it starts.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return ["fp8doctor"]
    words = parent.decode(errors="replace").removesuffix("\0").split("\0")
    before = words[: len(words) - len(typed)]
    ours = before[-2:] == ["-m", "fp8doctor"] or (before and Path(before[-1]).name == "fp8doctor")
    wrapped = before and Path(before[0]).name in WRAPPERS
    if not ours or wrapped or len(before) < 2 or words[len(before) :] != list(typed):
        return ["fp8doctor"]
    interpreter, program, *rest = before
    command = Path(program).name
    found = shutil.which(command) if Path(interpreter).name.startswith("python") and rest else None
    return [command, *rest] if found and same_file(Path(found), Path(program)) else before


def options_with_value(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield from parameter.opts


def first_word(args: Sequence[str], with_value: set[str], words: tuple[str, ...] = ()) -> int | None:
    """Find the index of the first word that is no option and no option's value.

    A word that begins like one of ``words`` is not an option.
    """
    is_value = False
    for at, arg in enumerate(args):
        if is_value:
            is_value = False
        elif arg.startswith(words):
            return at
        elif arg == "--":
            return None
        elif arg.startswith("--"):
            is_value = arg in with_value
        elif arg.startswith("-") and len(arg) > 1:
            is_value = f"-{arg[-1]}" in with_value and not any(
                f"-{letter}" in with_value for letter in arg[1:-1]
            )
        else:
            return at
    return None
