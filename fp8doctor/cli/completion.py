"""What the shell completes besides commands: codes and GPUs, through click's own mechanism."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def codes(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last code of a list."""
    from fp8doctor import registry

    before, comma, begun = incomplete.rpartition(",")
    return [
        CompletionItem(f"{before}{comma}{check.code}", help=check.title)
        for check in registry.discover()
        if check.code.startswith(begun.upper())
    ]


def gpus(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a GPU with a datasheet."""
    from fp8doctor.cost import GPUS

    return [CompletionItem(spec.name) for spec in GPUS if spec.name.startswith(incomplete.upper())]
