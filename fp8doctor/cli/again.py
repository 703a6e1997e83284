"""The command that the user typed, written so that it can be typed again.

It is printed and never saved: arguments may hold what a report must not.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from fp8doctor.files import same_file

TYPED = "fp8doctor.typed"
"""Key of click's context for the words behind ``fp8doctor``, as they were typed."""

ORDERED = "fp8doctor.ordered"
"""Key for the same words with the command first; an empty word stands for examining a target."""

SCRIPT = "script"
"""Key for the words of ``run`` that are the script's."""

TIMES_NOTHING = ("--no-trial", "--trial", "--stop")
"""Flags that are left out: the last two are written anew, or end later than ``--stop``."""

ELSEWHERE = ("--assume-gpu", "--device")
"""Options that are left out with their values where these are not of a GPU that can be timed on."""


def typed_again(context: click.Context | None) -> str:
    """Write the command that times the same job on a GPU; empty where no job was named."""
    words = context.meta.get(ORDERED) if context else None
    if context is None or not words or (words[0] != "run" and "target" not in context.params):
        return ""
    script = context.meta.get(SCRIPT, []) if words[0] == "run" else []
    options = _that_time(words[1 : len(words) - len(script)])
    command = ["run", "--stop"] if words[0] == "run" else []
    from fp8doctor.facts.secrets import without_credentials

    started = _started_by(context.meta[TYPED])
    return without_credentials(shlex.join([*started, *command, *options, *script]))


def _that_time(words: Sequence[str]) -> Iterator[str]:
    """Leave out the options without which the same command times copies on a GPU."""
    left = iter(words)
    for word in left:
        name, given, value = word.partition("=")
        if name in ELSEWHERE:
            value = value if given else next(left, "")
            if name == "--device" and not value.startswith("cpu"):
                yield from (name, value)
        elif name not in TIMES_NOTHING:
            yield word


def _started_by(typed: Sequence[str]) -> list[str]:
    """Find how fp8doctor was started: behind a launcher, such as ``accelerate launch``, with all its words.

    The command line of a launcher ends with that of the process that it starts.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return ["fp8doctor"]
    words = parent.decode(errors="replace").removesuffix("\0").split("\0")
    before = words[: len(words) - len(typed)]
    ours = before[-2:] == ["-m", "fp8doctor"] or (before and Path(before[-1]).name == "fp8doctor")
    if not ours or len(before) < 2 or words[len(before) :] != list(typed):
        return ["fp8doctor"]
    interpreter, program, *rest = before
    command = Path(program).name
    found = shutil.which(command) if Path(interpreter).name.startswith("python") and rest else None
    return [command, *rest] if found and same_file(Path(found), Path(program)) else before
