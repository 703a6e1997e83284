"""What the words of an error's text lead to where no known message is in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8doctor.glossary import Word
    from fp8doctor.headings import Heading
    from fp8doctor.known_errors import KnownError

LONGEST_MESSAGE = 300
"""Characters of a text without an exception's line whose words are looked for."""

LONGEST_LINE = 2000
"""Characters of an exception's line that are looked at."""

SHORTEST_NAME = 4
"""Characters of a name; GiB and TE are in too many messages."""

MOST_PAGES = 5
"""Pages that a name leads to."""

EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Warning)\b.*", re.MULTILINE)
"""The line that says what was raised."""

NAME = re.compile(r"[^\W_]_[^\W_]|[a-z][A-Z]")
"""What an ordinary word of a sentence does not have, and a name in code does."""

TERM = re.compile(rf"{NAME.pattern}| |[A-Z]{{2}}|\d")
"""What a term of the glossary has that no sentence uses by chance."""


def message(text: str) -> str:
    """Take the last exception of a text; the text itself where that is short, else nothing."""
    raised = EXCEPTION.findall(text)
    if raised:
        return str(raised[-1])[:LONGEST_LINE]
    return text if len(text) <= LONGEST_MESSAGE else ""


def names(text: str) -> list[str]:
    """Find the names in a message: functions, classes, statuses; not the exception's own."""
    words = (part for word in re.findall(r"[A-Za-z_][\w.]*", text) for part in word.split("."))
    kept = (each for each in words if len(each) >= SHORTEST_NAME and NAME.search(each))
    return list(dict.fromkeys(each for each in kept if not re.search(r"(?:Error|Exception|Warning)$", each)))


def errors_near(text: str) -> list[KnownError]:
    """Find the known messages that hold a name of this one."""
    from fp8doctor.known_errors import KNOWN_ERRORS

    wanted = names(text)
    return [error for error in KNOWN_ERRORS if any(_count(name, error.says) for name in wanted)]


def word_in(text: str) -> tuple[str, Word] | None:
    """Find the longest word of the glossary in a message that is a phrase or a name."""
    from fp8doctor import glossary

    found = [
        (name, word)
        for word in glossary.words()
        for name in word.names
        if word.codes and len(name) >= SHORTEST_NAME and TERM.search(name) and _count(name, text)
    ]
    return max(found, key=lambda each: len(each[0]), default=None)


def pages_near(text: str, catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the checks whose pages hold a name of this message, those with the most of them first."""
    wanted = names(text)
    counts = {check.code: sum(_count(name, check.page) for name in wanted) for check in catalogue}
    found = sorted((each for each in catalogue if counts[each.code]), key=lambda each: -counts[each.code])
    return found[:MOST_PAGES]


def _count(name: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", text))
