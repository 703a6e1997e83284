"""How a line of a report is marked."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mark = Literal["bad", "warning", "info", "healthy", "not_applicable", "unknown"]

MARKS: dict[Mark, tuple[str, str, str]] = {
    "bad": ("✗", "x", "bold red"),
    "warning": ("!", "!", "bold yellow"),
    "info": ("i", "i", "cyan"),
    "healthy": ("✓", "ok", "green"),
    "not_applicable": ("–", "-", "dim"),
    "unknown": ("?", "?", "magenta"),
}
"""Mark -> glyph, the same in ASCII, and style."""


class Line(Struct, frozen=True):
    """One line about an area."""

    mark: Mark
    area: str
    text: str = ""
    codes: tuple[str, ...] = ()
    """The checks that it tells of, where there may be several."""
