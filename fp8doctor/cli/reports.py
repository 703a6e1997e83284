"""Commands that show a report, but for those that examine a model or a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fp8doctor.cli.delivery import examine_and_deliver, replay_and_deliver
from fp8doctor.cli.options import READ, gate_options, output_options, report_options
from fp8doctor.cli.project import ProjectCommand

DEMO = Path(__file__).parents[1] / "demo.json.gz"


@click.command(cls=ProjectCommand)
@output_options
def env(**options: Any) -> int:
    """Check the environment, the packages and the GPUs, without a model."""
    return examine_and_deliver(None, options, layers=None, batch=None, seq=None)


@click.command(cls=ProjectCommand)
@click.argument("saved", type=READ)
@gate_options
@output_options
def report(saved: Path, **options: Any) -> int:
    """Show a saved report again, with the checks of this version."""
    return replay_and_deliver(saved, options)


@click.command()
@report_options("stdout", "never")
def demo(**options: Any) -> int:
    """Show the report of a recorded trial that ships with fp8doctor."""
    return replay_and_deliver(DEMO, options)
