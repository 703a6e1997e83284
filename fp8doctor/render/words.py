"""Words and marks for fixes, parts of a step, areas, and the basis of a number."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fp8doctor.finding import Basis
from fp8doctor.wording import plural

NOT_PROFILED = "not profiled"
"""Stands for the parts of a step if they are not known."""

FAMILIES = {
    "matmul": ("FP8 matmul", "other matmul"),
    "casts": ("casts",),
    "attention": ("attention",),
    "other": ("other",),
    "idle": ("idle",),
}
"""Parts of a bar, in a user's words -> columns of the table of ``-v``."""

HOW_KNOWN: dict[Basis, str] = {"measured": "measured", "modelled": "estimated", "rule": "by rule"}
"""Basis of a number -> the same in words."""

AREAS = {"engagement": "FP8 engaged", "lora": "LoRA", "step": "step time"}
"""Areas of checks -> what they are about; the others are words."""


def more_variants(count: int) -> str:
    """Name several variants that are shown together."""
    return plural(count, "more variant")


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
    """The checks that it tells of, if there may be several."""
