"""``fp8doctor compare``: two saved reports side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.areas import SEVERITIES
from fp8doctor.cli.delivery import told
from fp8doctor.cli.options import STRICT, positive, with_options
from fp8doctor.cli.pages import PageOptions, deliver_page, page_options
from fp8doctor.cli.project import ProjectCommand

if TYPE_CHECKING:
    from fp8doctor.diagnosis.comparison import Comparison
    from fp8doctor.diagnosis.document import Document


class Compare(ProjectCommand):
    """The gates of a project are about one report, so that they are not held here."""

    of_the_gate = False


@click.command(cls=Compare)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@page_options
@with_options(
    click.option(
        "--min-speedup",
        type=float,
        metavar="X",
        callback=positive,
        help="Exit with 1 unless SECOND is measured at X times the speed of FIRST, both on a GPU.",
    ),
    STRICT,
    click.option(
        "--max-regression",
        type=float,
        metavar="PCT",
        callback=positive,
        help="Exit with 1 if SECOND's step is slower than FIRST's by more than this, in percent.",
    ),
    click.option(
        "--fail-on",
        type=click.Choice(("never", *SEVERITIES)),
        default="never",
        show_default=True,
        help="Exit with 1 on a finding of this severity or higher that only SECOND has.",
    ),
)
def compare(first: Path, second: Path, *, format: str | None, output: Path | None, **gates: Any) -> int:
    """Compare two saved reports: time, tokens/s, memory, and why they differ.

    FIRST and SECOND are files from --save or --format json, for example of a BF16 and an FP8 run.
    """
    wanted = PageOptions.checked(format, output, [first, second])

    from fp8doctor.diagnosis.comparison import compared
    from fp8doctor.diagnosis.diagnose import replay
    from fp8doctor.render.comparison import page

    documents = replay(first), replay(second)
    found = compared(*documents, (first.name, second.name))
    deliver_page(wanted, found.to_json, lambda: page(found, documents))
    return told(tuple(missed(found, documents, **gates)))


def missed(
    found: Comparison,
    documents: tuple[Document, Document],
    *,
    min_speedup: float | None,
    strict: bool,
    max_regression: float | None,
    fail_on: str,
) -> Iterator[str]:
    """Say which gates the second report misses, in a sentence or two each."""
    from fp8doctor.cli.gate import longer_than, times_below
    from fp8doctor.diagnosis.regression import regression

    first, second = documents
    speedup, on_cpu = found.speedup, found.on_cpu
    if strict or min_speedup is not None:
        option = "--strict" if min_speedup is None else f"--min-speedup {min_speedup:g}"
        if on_cpu:
            yield f"{on_cpu[:1].upper()}{on_cpu[1:]}. {option} needs a GPU."
        elif speedup is None:
            yield f"There are not two measured steps. {option} needs them."
        elif found.is_noise:
            yield f"The timing is too noisy to tell which is faster. {option} needs a clear answer."
        elif min_speedup is not None and speedup.median < min_speedup:
            below = times_below(speedup.median, min_speedup)
            yield f"The second runs at {below} of the first's speed. --min-speedup asks for {min_speedup:g}x."
    if max_regression is not None:
        longer = regression(first.facts, second.facts, found.files[0], max_regression)
        if longer:
            yield longer_than(longer, max_regression)
    if fail_on in SEVERITIES:
        known = {each.code for each in first.findings}
        grave = SEVERITIES[SEVERITIES.index(fail_on) :]
        codes = [each.code for each in second.findings if each.severity in grave and each.code not in known]
        if codes:
            yield f"Only the second has {', '.join(codes)}. --fail-on {fail_on} fails on this."
