"""Text as a terminal shows it: printable, wrapped, and in ASCII if needed."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby

BOLD, DIM = "1", "2"
"""Styles of a terminal."""

NARROWEST = 40
"""Columns below which nothing is laid out; a narrower terminal breaks the lines by itself."""

UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that a terminal obeys (control, direction, line breaks) or cannot show."""

ASCII = str.maketrans("·−–—‘’“”×≥≤²", "|---''\"\"x><2")
"""Plain stand-ins, one character for one, so that no line grows."""


def printable_line(text: str) -> str:
    """Write one line: white space becomes one space, control characters become U+FFFD."""
    return printable(" ".join(text.split()))


def printable_lines(text: str) -> list[str]:
    """Write lines of code with their indentation, without control characters."""
    return [
        printable(line.expandtabs(4)).rstrip() for line in text.replace("\r\n", "\n").strip("\n").split("\n")
    ]


def printable(text: str) -> str:
    """Write the text with every character that is not printable replaced by U+FFFD."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) in UNPRINTABLE else each for each in text
    )


def to_ascii(text: str) -> str:
    """Write lines in ASCII, none wider than before; what has no stand-in becomes a question mark."""
    plain = text.translate(ASCII).encode("ascii", "replace").decode("ascii")
    return "\n".join(line.rstrip() for line in plain.split("\n"))


def wrap(items: Iterable[str], width: int, *, joint: str = " ") -> list[str]:
    """Wrap items into lines of at most ``width`` columns, each kept whole if it fits.

    An item too wide for a line is broken between words, a word too wide for a line anywhere.
    """
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1] + joint + item) <= width:
            lines[-1] += joint + item
        elif len(item) <= width:
            lines.append(item)
        elif " " in item:
            lines += wrap(item.split(" "), width)
        else:
            lines += [item[at : at + width] for at in range(0, len(item), width)]
    return [line.rstrip() for line in lines if line.strip()]


def filled_up(text: str, width: int, *, right: bool = False) -> str:
    """Fill a line up to a width, or cut it to that and say so."""
    text = text if len(text) <= width else f"{text[: max(0, width - 3)]}..."
    return text.rjust(width) if right else text.ljust(width)


KEPT = re.compile(r"\s|[-*] |\d+\. |https://|$")
"""Start of a line of code, a list, or an address, and an empty line."""

COMMENTED = re.compile(r"(\s*)(\S.*?)\s{2,}(# .*)")
"""A line of code with a comment behind it."""


def reflow(page: str, width: int) -> Iterator[str]:
    """Wrap the prose of a page; code, lists and addresses keep their lines, so that they can be copied.

    A comment goes above its line of code if both together are too long.
    """
    for is_kept, group in groupby(page.strip("\n").split("\n"), lambda line: bool(KEPT.match(line))):
        lines = [*group]
        if not is_kept:
            yield from wrap(" ".join(lines).split(), width)
            continue
        for line in lines:
            found = COMMENTED.fullmatch(line) if len(line) > width else None
            yield from found.expand(r"\1\3\n\1\2").split("\n") if found else [line]
