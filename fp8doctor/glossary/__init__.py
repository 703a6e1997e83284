"""The words of the field, of the frameworks and of this tool, each in a line or two."""

from __future__ import annotations

import functools
import re

from fp8doctor.glossary.field import FIELD
from fp8doctor.glossary.frameworks import FRAMEWORKS
from fp8doctor.glossary.tool import TOOL
from fp8doctor.glossary.word import Word

__all__ = ["WORDS", "Word", "alike", "look_up", "within"]

WORDS: tuple[Word, ...] = (*FIELD, *FRAMEWORKS, *TOOL)

LONGEST = 60
"""Characters of what is looked up; a longer text is none of these words."""


def look_up(text: str) -> tuple[str, Word] | None:
    """Find a word, however it is capitalised, hyphenated or spaced; with its name in its own spelling."""
    return _by_key().get(_key(text)) if len(text) <= LONGEST else None


def within(text: str) -> tuple[str, Word] | None:
    """Find the longest word that stands in a phrase; a letter beside it makes it another word."""
    if len(text) > LONGEST:
        return None
    found = [
        known
        for known in _by_key().values()
        if re.search(rf"(?<![\w-]){re.escape(known[0])}(?![\w-])", text, re.IGNORECASE)
    ]
    return max(found, key=lambda known: len(known[0]), default=None)


def alike(text: str) -> list[str]:
    """Name the words that are spelled nearly so, the nearest first."""
    from difflib import get_close_matches

    known = _by_key()
    return [known[key][0] for key in get_close_matches(_key(text), known, n=3, cutoff=0.75)]


@functools.cache
def _by_key() -> dict[str, tuple[str, Word]]:
    return {_key(name): (name, word) for word in WORDS for name in word.names}


def _key(text: str) -> str:
    """Keep letters and digits, and the slash and the plus that tell two words apart."""
    return re.sub(r"[^\w/+]|_", "", text.lower())
