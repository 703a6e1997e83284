"""A page: the parts that text, Markdown and HTML lay out, each in its way."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from fp8doctor.answer.items import Mark
from fp8doctor.answer.items import Marked as Marked
from fp8doctor.answer.sentences import Box, Tone
from fp8doctor.answer.steps import COLUMNS, NONE_MS, Row

FAMILIES = {"matmul": 2, "casts": 1, "attention": 1, "other": 1, "idle": 1}
"""Part of a bar -> how many parts of `COLUMNS` it holds, in their order."""

SHADES = "·░▒▓█"
"""Of a `Heatmap`, from sound to worst; ``-`` is unknown."""


class Next(Struct, frozen=True):
    """What to type next, for readers of a terminal alone."""

    pieces: tuple[str, ...]
    command: str
    """Of the box, whole, if the box breaks it; else empty."""


class Quiet(Struct, frozen=True):
    """A paragraph in the background; a line breaks between its pieces, if `side_by_side` made it."""

    text: str


def side_by_side(pieces: Iterable[str]) -> Quiet:
    return Quiet(" · ".join(filter(None, pieces)))


class Look(NamedTuple):
    """A mark, as each reader sees it."""

    glyph: str
    ascii: str
    style: str
    """Of a terminal."""
    emoji: str
    words: str


LOOKS: dict[Mark, Look] = {
    "bad": Look("✗", "x", "1;31", "❌", "Serious"),
    "warning": Look("!", "!", "1;33", "⚠️", "Warning"),
    "info": Look("i", "i", "36", "ℹ️", "Note"),
    "healthy": Look("✓", "ok", "32", "✅", "Fine"),
    "not_applicable": Look("–", "-", "2", "➖", "Does not apply"),
    "unknown": Look("?", "?", "35", "❔", "Not known"),
}

TONES: dict[Tone, Mark] = {"bad": "bad", "good": "healthy", "plain": "warning"}
"""Tone of an answer -> its mark."""


class Strong(Struct, frozen=True):
    """The answer of a page that has no box."""

    text: str
    mark: Mark | None = None


class Marks(Struct, frozen=True):
    """A list, whose lines begin with a mark or a name if they have one."""

    rows: tuple[Marked, ...]


def labelled(rows: Iterable[tuple[str, str]]) -> Marks:
    return Marks(tuple(Marked(None, text, label) for label, text in rows))


class Code(Struct, frozen=True):
    """Lines that are shown as they are."""

    code: str


class Table(Struct, frozen=True):
    """Rows of cells: a name, then numbers, then text if there is a head for it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str = ""
    """Head of a last column of text, which is cut to the width; empty without one."""


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


class Bars(Struct, frozen=True):
    """The timed steps, as bars of their parts."""

    rows: tuple[Row, ...]

    def segments(self, row: Row) -> tuple[tuple[str, float], ...]:
        """Divide a bar: family -> ms, none shorter than what is printed; empty if the parts are not known."""
        left = iter(row.parts_ms if row.is_reliable else ())
        sums = {
            name: sum(ms for _, ms in zip(range(count), left, strict=False))
            for name, count in FAMILIES.items()
        }
        return tuple((name, ms) for name, ms in sums.items() if ms >= NONE_MS)

    @property
    def numbers(self) -> Table:
        """Write the same in numbers; without rows if no step was profiled."""
        rows = [
            (each.label, f"{each.ms:,.1f}", *(f"{ms:,.1f}" if ms >= NONE_MS else "-" for ms in each.parts_ms))
            for each in self.rows
            if each.parts_ms
        ]
        return Table(("ms/step", "all", *COLUMNS), tuple(rows))


class Heatmap(Struct, frozen=True):
    """Rows of numbers over time, as shades."""

    title: str
    columns: tuple[str, ...]
    """What each column is, for readers of HTML; the first and the last are shown."""
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    limits: tuple[float, ...]
    """A number below the n-th has at least the n-th shade."""

    def shade(self, number: float) -> int:
        """Return 0 for a sound number, up to the count of limits."""
        return sum(number < each for each in self.limits)

    def as_table(self) -> Table:
        drawn = (
            (name, "".join("-" if each is None else SHADES[self.shade(each)] for each in numbers))
            for name, numbers in self.rows
        )
        return Table((self.title,), tuple(drawn), text=f"{self.columns[0]} to {self.columns[-1]}")


Part = str | Next | Quiet | Strong | Marks | Code | Table | Bars | Heatmap | Box


def present(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Leave out what is empty: a list or table without rows, a paragraph without text, no code."""

    def content(part: Part) -> object:
        if isinstance(part, Quiet | Strong):
            return part.text
        return part.code if isinstance(part, Code) else getattr(part, "rows", part)

    return tuple(part for part in parts if isinstance(part, Box) or content(part))


class Section(Struct, frozen=True):
    """Parts under a heading; `present` ones."""

    title: str
    parts: tuple[Part, ...]
    is_folded: bool = False
    """True for what HTML shows when a reader opens it."""

    def __post_init__(self) -> None:
        force_setattr(self, "parts", present(self.parts))


class Page(Struct, frozen=True):
    """A page, in reading order, of what is `present`."""

    heading: tuple[str, ...]
    """Short pieces, side by side."""
    parts: tuple[Part, ...]
    """What every reader sees."""
    details: tuple[Section, ...] = ()
    """Of ``-v``, Markdown and HTML."""
    title: str = ""
    """Of the HTML; the first piece of the heading if it is empty."""

    def __post_init__(self) -> None:
        force_setattr(self, "heading", tuple(filter(None, self.heading)))
        force_setattr(self, "parts", present(self.parts))
        force_setattr(self, "details", tuple(each for each in self.details if each.parts))
