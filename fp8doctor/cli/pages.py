"""Commands that print a page, not a report: ``compare``, ``health``, ``trace``, ``why``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from fp8doctor.answer.layer_rows import as_json, layer_reports, named
from fp8doctor.areas import SEVERITIES
from fp8doctor.cli.console import FAILED, OK, complain
from fp8doctor.cli.delivery import exit_code, format_of, keep_apart, laid_out, show_in, terminal, writable
from fp8doctor.cli.gate import asked, is_same_job, longer, times_below
from fp8doctor.cli.options import READ, STRICT, delivery_options, fail_on, number, option, with_options
from fp8doctor.cli.project import Ungated
from fp8doctor.diagnosis.comparison import Comparison
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.traces import conclude
from fp8doctor.errors import UserError
from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.files import write_text
from fp8doctor.profiling.users_trace import traced_step
from fp8doctor.render import trace_page, why_page
from fp8doctor.render.page import Page
from fp8doctor.shown import compare as compared
from fp8doctor.shown import load_health

PAGE_FORMATS = ("text", "json", "markdown", "html")

page_options = delivery_options(PAGE_FORMATS, "stdout", several=False)

Deliver = Callable[[Callable[[], str], Callable[[], Page]], None]
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
        "--min-speedup", "X", "Exit with 1 unless SECOND is measured at X times FIRST's speed.", rare=True
    ),
    STRICT,
    number("--max-regression", "PCT", "Exit with 1 if SECOND's step is slower by more than this."),
    fail_on(
        "never", "Exit with 1 from this severity on, if only SECOND has it: never, info, warning or error."
    ),
)
def compare(first: Path, second: Path, *, format: str | None, output: Path | None, **gates: Any) -> int:
    """Compare two files from --save: time, tokens/s, memory, and why they differ."""
    deliver = delivery_of(format, output, first, second)
    shown = compared(first, second)
    deliver(shown.to_json, shown.page)
    is_gate = any(each not in (None, False, "never") for each in gates.values())
    if is_gate and not is_same_job(shown.reports[0].facts, shown.reports[1].facts, first.name):
        return FAILED
    return exit_code(missed(shown.found, shown.reports, **gates))


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
    first, second = documents
    speedup, on_cpu = found.speedup, found.on_cpu
    if strict or min_speedup is not None:
        wanted = asked(min_speedup)
        if on_cpu:
            yield f"{on_cpu[:1].upper()}{on_cpu[1:]}. {wanted} needs a GPU."
        elif speedup is None:
            yield f"There are not two measured steps. {wanted} needs them."
        elif found.is_noise:
            yield f"The timing is too noisy to tell which is faster. {wanted} needs a clear answer."
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
@option("-v", "--verbose", help="Show every kernel.")
def trace(file: Path, *, format: str | None, output: Path | None, verbose: bool) -> int:
    """Read a torch.profiler trace: where the time goes, and whether FP8 matmuls ran.

    FILE is what export_chrome_trace or tensorboard_trace_handler wrote, .json or .json.gz. No GPU and no
    torch are needed.
    """
    deliver = delivery_of(format, output, file)
    try:
        document = conclude(traced_step(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot read {file} as a trace of a GPU: {error}") from None
    deliver(document.to_json, lambda: trace_page.page(document, verbose=verbose))
    return OK


@click.command()
@click.argument("file", type=READ)
@page_options
@option("-v", "--verbose", help="Show every layer.")
def health(file: Path, *, format: str | None, output: Path | None, verbose: bool) -> int:
    """Show FP8's health over a run: which layers lose precision, and since when.

    FILE is a file from 'fp8doctor run --health'. No GPU and no torch are needed.
    """
    deliver = delivery_of(format, output, file)
    shown = load_health(file)
    whole = verbose or format_of(format, output, PAGE_FORMATS) == "html"
    deliver(shown.to_json, lambda: shown.page(verbose=whole))
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
    if not layer.strip("."):
        raise UserError("no layer was named")
    document = replay(saved)
    found = layer_reports(named(layer, document.facts), document)
    deliver(lambda: as_json(found), lambda: why_page.page(found, layer, document.facts))
    return OK
