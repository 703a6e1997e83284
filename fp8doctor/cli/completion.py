"""What the shell completes: commands, codes and GPUs, through click's own mechanism."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def targets(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the first word: a command, or the file of a model."""
    from fp8doctor.cli.commands import main

    commands = [
        CompletionItem(name, help=command.get_short_help_str())
        for name, command in main.commands.items()
        if name.startswith(incomplete)
    ]
    return [*commands, CompletionItem(incomplete, type="file")]


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
