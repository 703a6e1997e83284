"""``fp8doctor why``: all that a saved report knows of one layer."""

from __future__ import annotations

from pathlib import Path

import click

from fp8doctor.cli.delivery import OK
from fp8doctor.cli.pages import PageOptions, deliver_page, page_options
from fp8doctor.errors import UserError


@click.command()
@click.argument("layer")
@click.argument("saved", type=click.Path(path_type=Path))
@page_options
def why(layer: str, saved: Path, *, format: str | None, output: Path | None) -> int:
    """Show everything that a saved report knows about one layer.

    LAYER is its name in the report, a part of it (mlp.down, 0.attn.q) or a pattern ("*.mlp.*"). Several
    layers give a table, or a list with --format json.
    """
    wanted = PageOptions.checked(format, output, [saved])

    from fp8doctor.diagnosis.diagnose import replay
    from fp8doctor.diagnosis.layer import as_json, layer_reports, named
    from fp8doctor.render.layer import overview, page

    if not layer.strip("."):
        raise UserError("no layer was named")
    document = replay(saved)
    found = layer_reports(named(layer, document.facts), document)
    deliver_page(
        wanted,
        lambda: as_json(found),
        lambda: page(found[0]) if len(found) == 1 else overview(found, layer),
    )
    return OK
