"""Commands that print a page, not a report: ``compare``, ``health``, ``trace``, ``why``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.areas import SEVERITIES
from fp8doctor.cli.console import FAILED, OK, complain
from fp8doctor.cli.delivery import (
    exit_code,
    format_of,
    keep_apart,
    laid_out,
    show_in,
    terminal,
    writable,
)
from fp8doctor.cli.options import FILE, READ, STRICT, Rare, fail_on, number, with_options
from fp8doctor.cli.project import Ungated
from fp8doctor.errors import UserError
from fp8doctor.files import write_text

if TYPE_CHECKING:
    from fp8doctor.diagnosis.comparison import Comparison
    from fp8doctor.diagnosis.document import Document
    from fp8doctor.render.page import Page

PAGE_FORMATS = ("text", "json", "markdown", "html")

page_options = with_options(
    click.option(
        "--format",
        metavar="FORMAT",
        type=click.Choice(PAGE_FORMATS),
        help="text, json, markdown or html. Default: by the suffix of -o, else text.",
    ),
    click.option("-o", "--output", metavar="FILE", type=FILE, help="Write to a file instead of stdout."),
)


Deliver = Callable[[Callable[[], str], Callable[[], "Page"]], None]
"""Takes what writes the JSON and what makes the page, of which the format needs one."""


def delivery_of(format: str | None, output: Path | None, *sources: Path) -> Deliver:
    """Check the options, before any work. Raises `UserError` or a usage error."""
    if output is not None:
        writable(output)
        for source in sources:
            keep_apart([("-o", output)], source)
    format = format_of(format, output, PAGE_FORMATS)

    def deliver(json: Callable[[], str], page: Callable[[], Page]) -> None:
        made = json() if format == "json" else page()
        if output:
            write_text(output, laid_out(made, format))
            complain(f"wrote {output}")
        else:
            show_in(format, laid_out(made, format, **terminal()))

    return deliver


@click.command(cls=Ungated)
@click.argument("first", type=READ)
@click.argument("second", type=READ)
@page_options
@with_options(
    number(
        "--min-speedup",
        "X",
        "Exit with 1 unless SECOND is measured at X times the speed of FIRST, both on a GPU.",
        cls=Rare,
    ),
    STRICT,
    number(
        "--max-regression",
        "PCT",
        "Exit with 1 if SECOND's step is slower by more than this.",
    ),
    fail_on(
        "never", "Exit with 1 from this severity on, if only SECOND has it: never, info, warning or error."
    ),
)
def compare(first: Path, second: Path, *, format: str | None, output: Path | None, **gates: Any) -> int:
    """Compare two files from --save: time, tokens/s, memory, and why they differ."""
    deliver = delivery_of(format, output, first, second)

    from fp8doctor.cli.gate import is_same_job
    from fp8doctor.diagnosis.comparison import compared
    from fp8doctor.diagnosis.diagnose import replay
    from fp8doctor.render.compare_page import page

    documents = replay(first), replay(second)
    found = compared(*documents, (first.name, second.name))
    deliver(found.to_json, lambda: page(found, documents))
    asked = any(each not in (None, False, "never") for each in gates.values())
    if asked and not is_same_job(documents[0].facts, documents[1].facts, first.name):
        return FAILED
    return exit_code(missed(found, documents, **gates))


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
    from fp8doctor.cli.gate import asked, longer, times_below

    first, second = documents
    speedup, on_cpu = found.speedup, found.on_cpu
    if strict or min_speedup is not None:
        option = asked(min_speedup)
        if on_cpu:
            yield f"{on_cpu[:1].upper()}{on_cpu[1:]}. {option} needs a GPU."
        elif speedup is None:
            yield f"There are not two measured steps. {option} needs them."
        elif found.is_noise:
            yield f"The timing is too noisy to tell which is faster. {option} needs a clear answer."
        elif min_speedup is not None and speedup.value < min_speedup:
            below = times_below(speedup.value, min_speedup)
            yield f"The second runs at {below} of the first's speed. --min-speedup asks for {min_speedup:g}x."
    if max_regression is not None:
        yield from longer(first.facts, second.facts, found.files[0], max_regression)
    if fail_on in SEVERITIES:
        known = {each.code for each in first.findings}
        grave = SEVERITIES[SEVERITIES.index(fail_on) :]
        codes = [each.code for each in second.findings if each.severity in grave and each.code not in known]
        if codes:
            yield f"Only the second has {', '.join(codes)}. --fail-on {fail_on} fails on this."


@click.command()
@click.argument("file", type=READ)
@page_options
@click.option("-v", "--verbose", is_flag=True, help="Show every kernel.")
def trace(file: Path, *, format: str | None, output: Path | None, verbose: bool) -> int:
    """Read a torch.profiler trace: where the time goes, and whether FP8 matmuls ran.

    FILE is what export_chrome_trace or tensorboard_trace_handler wrote, .json or .json.gz. No GPU and no
    torch are needed.
    """
    deliver = delivery_of(format, output, file)

    from fp8doctor.diagnosis.traces import conclude
    from fp8doctor.facts.record import UnreadableDocument
    from fp8doctor.profiling.users_trace import traced_step
    from fp8doctor.render.trace_page import page

    try:
        document = conclude(traced_step(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot read {file} as a trace of a GPU: {error}") from None
    deliver(document.to_json, lambda: page(document, verbose=verbose))
    return OK


@click.command()
@click.argument("file", type=READ)
@page_options
@click.option("-v", "--verbose", is_flag=True, help="Show every layer.")
def health(file: Path, *, format: str | None, output: Path | None, verbose: bool) -> int:
    """Show FP8's health over a run: which layers lose precision, and since when.

    FILE is a file from 'fp8doctor run --health'. No GPU and no torch are needed.
    """
    deliver = delivery_of(format, output, file)

    from fp8doctor.health.record import read_health
    from fp8doctor.health.verdict import conclude
    from fp8doctor.render import health_page

    whole = verbose or format_of(format, output, PAGE_FORMATS) == "html"
    found = read_health(file)
    judged = found, conclude(found)
    deliver(lambda: health_page.as_json(judged), lambda: health_page.page(judged, verbose=whole))
    return OK


@click.command()
@click.argument("layer")
@click.argument("saved", type=READ)
@page_options
def why(layer: str, saved: Path, *, format: str | None, output: Path | None) -> int:
    """Show everything that a saved report knows about one layer.

    LAYER is its name in the report, a part of it (mlp.down, 0.attn.q) or a pattern ("*.mlp.*"). Several
    layers give a table, or a list with --format json.
    """
    deliver = delivery_of(format, output, saved)

    from fp8doctor.answer.layer_rows import as_json, layer_reports, named
    from fp8doctor.diagnosis.diagnose import replay
    from fp8doctor.render.why_page import page

    if not layer.strip("."):
        raise UserError("no layer was named")
    document = replay(saved)
    found = layer_reports(named(layer, document.facts), document)
    deliver(
        lambda: as_json(found),
        lambda: page(found, layer, document.facts),
    )
    return OK
