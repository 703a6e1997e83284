"""Terms of the field, of the frameworks and of fp8doctor, in a line or two."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

LONGEST = 60
"""Longest text to look up, in characters; a longer one is not a term."""


class Word(NamedTuple):
    """A term, a setting or a name that people type, with its meaning."""

    names: tuple[str, ...]
    """The first is shown; the others are spellings and related terms."""
    says: str
    codes: tuple[str, ...] = ()
    """Checks whose pages explain more, most relevant first."""


@functools.cache
def words() -> tuple[Word, ...]:
    """Read the glossary, sorted by name."""
    table = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text("utf-8"))
    return tuple(
        Word(tuple(each["names"]), each["says"], tuple(each.get("codes", ()))) for each in table["word"]
    )


def look_up(text: str) -> tuple[str, Word] | None:
    """Find a word regardless of capitals, hyphens and blanks; also return its name."""
    return _by_key().get(_key(text)) if len(text) <= LONGEST else None


def within(text: str) -> tuple[str, Word] | None:
    """Find the longest word in a phrase, between characters that are not letters."""
    if len(text) > LONGEST:
        return None
    found = [
        known
        for known in _by_key().values()
        if re.search(rf"(?<![\w-]){re.escape(known[0])}(?![\w-])", text, re.IGNORECASE)
    ]
    return max(found, key=lambda known: len(known[0]), default=None)


def alike(text: str) -> list[str]:
    """List the words with similar spelling, most similar first."""
    from difflib import get_close_matches

    known = _by_key()
    return [known[key][0] for key in get_close_matches(_key(text), known, n=3, cutoff=0.75)]


@functools.cache
def _by_key() -> dict[str, tuple[str, Word]]:
    return {_key(name): (name, word) for word in words() for name in word.names}


def _key(text: str) -> str:
    """Keep letters, digits, and the slash and plus that distinguish two words."""
    return re.sub(r"[^\w/+]|_", "", text.lower())
