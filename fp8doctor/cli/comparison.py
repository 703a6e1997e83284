"""``fp8doctor compare``: two saved reports side by side."""

from __future__ import annotations

from pathlib import Path

import click

from fp8doctor.cli.delivery import FOUND, OK
from fp8doctor.cli.options import positive
from fp8doctor.cli.pages import PageOptions, deliver_page, page_options


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@page_options
@click.option(
    "--min-speedup",
    type=float,
    metavar="X",
    callback=positive,
    help="Exit with 1 unless SECOND is measured at X times the speed of FIRST.",
)
def compare(
    first: Path, second: Path, *, format: str | None, output: Path | None, min_speedup: float | None
) -> int:
    """Compare two saved reports: time, tokens/s, memory, and why they differ.

    FIRST and SECOND are what --save or --format json wrote, such as the reports of a BF16 and an FP8 run.
    """
    wanted = PageOptions.checked(format, output, [first, second])

    from fp8doctor.diagnosis.comparison import compared
    from fp8doctor.diagnosis.diagnose import replay
    from fp8doctor.render.comparison import page

    documents = replay(first), replay(second)
    found = compared(*documents, (first.name, second.name))
    deliver_page(wanted, found.to_json, lambda: page(found, documents))
    missed = min_speedup is not None and (found.speedup is None or found.speedup.median < min_speedup)
    return FOUND if missed else OK
