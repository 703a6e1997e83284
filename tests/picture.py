"""The picture of a screen at the top of README.md: what ``fp8doctor demo`` prints, as rich draws it."""

import io
import re
from xml.etree import ElementTree

from click.testing import CliRunner

from fp8doctor import cli

WIDTH = 100
"""Columns of the terminal that is drawn."""

TERMINAL = {"COLUMNS": str(WIDTH), "LC_ALL": "C.UTF-8", "TERM": "xterm-256color", "NO_COLOR": None}
"""What the program asks of a terminal; the same on every machine."""

FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="fp8doctor demo">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""  # noqa: E501
"""Rich's own, without fonts that are loaded from elsewhere."""


def printed(*arguments: str, code: int, colour: bool = False) -> str:
    """What a command prints on a terminal of so many columns."""
    environment = {**TERMINAL, "FORCE_COLOR": "1" if colour else None}
    done = CliRunner().invoke(cli.main, arguments, color=colour, env=environment)
    assert done.exit_code == code, done.output
    assert "crashed" not in done.stdout, done.stdout
    return done.stdout


def picture() -> str:
    """Draw that screen."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for line in printed("demo", code=0, colour=True).rstrip("\n").split("\n"):
        console.print(Text.from_ansi(line), no_wrap=True, crop=False, overflow="ignore")
    return console.export_svg(title="fp8doctor demo", unique_id="screen", code_format=FORMAT)


def shown(drawing: str) -> list[tuple[str, str]]:
    """The pieces of text in a drawing, each with its style: how a version of rich places them is left out."""
    styles = dict(re.findall(r"\.(screen-r\d+) \{(.*?)\}", drawing))
    texts = ElementTree.fromstring(drawing).findall(".//{*}text")
    pieces = ((each.text or "", each.get("class", "")) for each in texts)
    return [(text, styles[name].strip()) for text, name in pieces if name in styles and text.strip()]
