"""The command that answers what is open, in the words that the user typed. Printed, never saved."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click
from msgspec.structs import replace

from fp8doctor.answer.commands import launcher, more_time, timed, with_more_time
from fp8doctor.cli.options import WORDS
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts.secrets import without_credentials

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
