"""Commands that show what was saved: a report, or a page of another kind."""

from pathlib import Path
from typing import Any

import click

from fp8doctor.answer.layer_rows import layer_report, named
from fp8doctor.cli.console import FAILED, OK
from fp8doctor.cli.delivery import checked_output, examine_and_deliver, replay_and_deliver
from fp8doctor.cli.gate import Gate, exit_code, is_same_job
from fp8doctor.cli.options import (
    READ,
    STRICT,
    delivery_options,
    fail_on,
    gate_options,
    number,
    option,
    output_options,
    report_options,
)
from fp8doctor.cli.project import ProjectCommand
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.traces import conclude
from fp8doctor.errors import UserError
from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling.users_trace import traced_step
from fp8doctor.render import trace_page, why_page
from fp8doctor.report import compare as compared
from fp8doctor.report import load_health

DEMO = Path(__file__).parents[1] / "demo.json.gz"

PAGE_FORMATS = ("text", "json", "markdown", "html")

page_options = delivery_options(PAGE_FORMATS, "stdout")


@click.command(cls=ProjectCommand, params=[*output_options])
def env(**options: Any) -> int:
    """Check the environment, the packages and the GPUs, without a model."""
    return examine_and_deliver(None, options, layers=None, batch=None, seq=None)


@click.command(cls=ProjectCommand, params=[*gate_options, *output_options])
@click.argument("saved", type=READ)
def report(saved: Path, **options: Any) -> int:
    """Show a saved report again, with the checks of this version."""
    return replay_and_deliver(saved, options)


@click.command(params=[*report_options("stdout", "never")])
def demo(**options: Any) -> int:
    """Show the report of a recorded trial that ships with fp8doctor."""
    return replay_and_deliver(DEMO, options)


@click.command(
    params=[
        *page_options,
        number(
            "--min-speedup", "X", "Exit with 1 unless SECOND is measured at X times FIRST's speed.", rare=True
        ),
        STRICT,
        number("--max-regression", "PCT", "Exit with 1 if SECOND's step is slower by more than this."),
        fail_on(
            "never",
            "Exit with 1 from this severity on, if only SECOND has it: never, info, warning or error.",
        ),
    ]
)
@click.argument("first", type=READ)
@click.argument("second", type=READ)
def compare(first: Path, second: Path, **options: Any) -> int:
    """Compare two files from --save: time, tokens/s, memory, and why they differ."""
    out, gate = checked_output(options, first, second, formats=PAGE_FORMATS), Gate.of(options)
    shown = compared(first, second)
    out.deliver(lambda format: shown.to_json() if format == "json" else shown.page())
    one, other = shown.reports
    if gate != Gate() and not is_same_job(one.facts, other.facts, first.name):
        return FAILED
    return exit_code(gate.missed_by_second(shown.found, one, other))


@click.command(params=[*page_options, option("-v", "--verbose", help="Show every kernel.")])
@click.argument("file", type=READ)
def trace(file: Path, verbose: bool, **options: Any) -> int:
    """Read a torch.profiler trace: where the time goes, and whether FP8 matmuls ran.

    FILE is what export_chrome_trace or tensorboard_trace_handler wrote, .json or .json.gz. No GPU and no
    torch are needed.
    """
    out = checked_output(options, file, formats=PAGE_FORMATS)
    try:
        document = conclude(traced_step(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot read {file} as a trace of a GPU: {error}") from None
    page = trace_page.page(document, verbose=verbose)
    out.deliver(lambda format: document.to_json() if format == "json" else page)
    return OK


@click.command(params=[*page_options, option("-v", "--verbose", help="Show every layer.")])
@click.argument("file", type=READ)
def health(file: Path, verbose: bool, **options: Any) -> int:
    """Show FP8's health over a run: which layers lose precision, and since when.

    FILE is a file from 'fp8doctor run --health'. No GPU and no torch are needed.
    """
    out = checked_output(options, file, formats=PAGE_FORMATS)
    shown = load_health(file)
    out.deliver(
        lambda format: (
            shown.to_json() if format == "json" else shown.page(verbose=verbose or format == "html")
        )
    )
    return OK


@click.command(params=[*page_options])
@click.argument("layer")
@click.argument("saved", type=READ)
def why(layer: str, saved: Path, **options: Any) -> int:
    """Show everything that a saved report knows about one layer.

    LAYER is its name in the report, or a part that no other has (0.attn.q). -v of a report lists all layers.
    """
    out = checked_output(options, saved, formats=PAGE_FORMATS)
    document = replay(saved)
    found = layer_report(named(layer, document.facts), document)
    page = why_page.page(found, document.facts)
    out.deliver(lambda format: found.to_json() if format == "json" else page)
    return OK
