"""What the shell completes besides commands: codes, words and GPUs, through click's own mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def codes(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last code of a list."""
    from click.shell_completion import CompletionItem

    from fp8doctor.headings import headings

    before, comma, begun = incomplete.rpartition(",")
    return [
        CompletionItem(f"{before}{comma}{check.code}", help=check.title)
        for check in headings()
        if check.code.startswith(begun.upper())
    ]


def codes_and_words(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete what can be explained: a code, or where something was begun a word of the glossary."""
    from click.shell_completion import CompletionItem

    from fp8doctor.glossary import WORDS

    begun = incomplete.lower()
    words = [(name, word) for word in WORDS for name in word.names if name.lower().startswith(begun)]
    return [
        *codes(ctx, parameter, incomplete),
        *(CompletionItem(name, help=word.says) for name, word in words if begun),
    ]


def gpus(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a GPU with a datasheet."""
    from click.shell_completion import CompletionItem

    from fp8doctor.gpus import GPUS

    return [CompletionItem(spec.name) for spec in GPUS if spec.name.startswith(incomplete.upper())]
