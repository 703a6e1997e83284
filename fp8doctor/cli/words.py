"""Words among the arguments: which is an option, which is the value of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click


def options_with_value(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield from parameter.opts


def first_word(args: Sequence[str], with_value: set[str], words: tuple[str, ...] = ()) -> int | None:
    """Where the first word stands that is neither an option nor the value of one.

    What begins like one of ``words`` is no option.
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
