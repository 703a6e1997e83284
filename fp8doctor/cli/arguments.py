"""A command line as words: find the target, and write the command again."""

import shlex
from collections.abc import Iterator, Sequence

import click

ORDERED = "fp8doctor.ordered"
"""Key in click's context: the words after ``fp8doctor``, the command first; an empty word means examining a
target."""

SCRIPT = "script"
"""Key: the script's words in ``run``."""

TIMES_NOTHING = ("--no-trial", "--stop", "--stop-on-nan")
"""Flags to drop: ``--stop`` replaces the last two."""

ELSEWHERE = ("--assume-gpu", "--device", "--health", "--every")
"""Options to drop with their values, unless the value names a GPU. A stopped script has no long run."""


def typed_again(context: click.Context | None) -> tuple[str, str]:
    """Write the command that times this job on a GPU, and a script's words; both are empty without a job."""
    words = context.meta.get(ORDERED) if context else None
    if context is None or not words or (words[0] != "run" and "target" not in context.params):
        return "", ""
    script = context.meta.get(SCRIPT, []) if words[0] == "run" else []
    options = _that_time(words[1 : len(words) - len(script)])
    command = ["run", "--stop"] if words[0] == "run" else []
    from fp8doctor.facts.secrets import without_credentials

    ours = shlex.join(["fp8doctor", *command, *options])
    return without_credentials(ours), without_credentials(shlex.join(script))


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


def options_with_value(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield from parameter.opts


def first_word(args: Sequence[str], with_value: set[str], words: tuple[str, ...] = ()) -> int | None:
    """Find the first word that is no option and no option's value; one that begins like ``words`` is none."""
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
