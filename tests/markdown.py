"""Pages of Markdown: their tables, their blocks of code, and the parts that are made from the program."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

FENCED = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.S | re.M)

GENERATED = "(<!-- generated: {} -->\n)(.*?)(<!-- end -->)"
"""Where a part that is made from the program stands, by its name."""


class Block(NamedTuple):
    """A block of code, with the comment that stands above it."""

    page: str
    mark: str
    language: str
    code: str


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def written_by_hand() -> tuple[str, ...]:
    """The pages of the project that a user reads."""
    return ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def blocks(page: str) -> Iterator[Block]:
    for found in FENCED.finditer(text(page)):
        yield Block(page, found["mark"] or "", found["language"], found["code"])


def fenced(mark: str) -> str:
    """The code of the one block under a comment, on whichever page it stands."""
    found = [block.code for page in written_by_hand() for block in blocks(page) if block.mark == mark]
    assert len(found) == 1, f"{len(found)} blocks are marked {mark!r}"
    return found[0]


def prose(page: str) -> str:
    """What is written by hand of a page, without its blocks of code."""
    return FENCED.sub("", re.sub(GENERATED.format(r"\w+"), "", text(page), flags=re.S))


def split_sentences(page: str) -> Iterator[str]:
    """The sentences, items, headings and cells of a page; `CODE` stands for code, pictures are left out."""
    page = re.sub(
        r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)|^\|[-| :]+\|$", "", FENCED.sub("", page), flags=re.S | re.M
    )
    page = re.sub(r"`[^`]+`", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page))
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|>]|\d+\.) ?)|\|", page):
        words = " ".join(re.sub(r"^\s*(?:[-*#>]+|\d+\.)\s", "", part).replace("**", "").split())
        yield from filter(None, re.split(r"(?<=[.!?])\s+(?=[A-Z\"]|fp8doctor)", words))


def rows_after(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first row begins with ``head``."""
    whole = text(page)
    lines = whole[whole.index(f"| {head} ") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown; a bar inside a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
