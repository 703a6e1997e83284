"""Shell completion of codes and GPUs, through click's own mechanism."""

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


def gpus(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a GPU with a datasheet."""
    from click.shell_completion import CompletionItem

    from fp8doctor.gpus import GPUS

    return [CompletionItem(spec.name) for spec in GPUS if spec.name.startswith(incomplete.upper())]
