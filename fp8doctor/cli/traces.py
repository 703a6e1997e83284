"""``fp8doctor trace``: what a trace of the user's own profiler says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fp8doctor.cli.delivery import OK
from fp8doctor.cli.pages import PageOptions, deliver_page, page_options
from fp8doctor.errors import UserError

if TYPE_CHECKING:
    from fp8doctor.facts.traced import TracedStep

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("first", type=FILE)
@click.argument("second", type=FILE, required=False)
@page_options
@click.option("-v", "--verbose", is_flag=True, help="Show every kernel.")
def trace(first: Path, second: Path | None, *, format: str | None, output: Path | None, verbose: bool) -> int:
    """Read a torch.profiler trace: where the time goes, and whether FP8 matmuls ran.

    With a second trace, explain the difference. FIRST and SECOND are files that export_chrome_trace or
    tensorboard_trace_handler wrote, .json or .json.gz. No GPU and no torch are needed.
    """
    files = [first] if second is None else [first, second]
    wanted = PageOptions.checked(format, output, files)

    from fp8doctor.diagnosis.traces import told
    from fp8doctor.render.traces import page

    document = told([read(file) for file in files])
    deliver_page(wanted, document.to_json, lambda: page(document, verbose=verbose))
    return OK


def read(file: Path) -> TracedStep:
    """Read one trace. Raises `UserError` with what was and was not seen."""
    from fp8doctor.facts.record import UnreadableDocument
    from fp8doctor.profiling.users_trace import traced_step

    try:
        return traced_step(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot read {file} as a trace of a GPU: {error}") from None
