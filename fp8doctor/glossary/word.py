"""What is known of a word."""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """A term, a setting or a name that people type, and what it means."""

    names: tuple[str, ...]
    """The first is shown; the others are spellings and near relations that the same sentence answers."""
    says: str
    """One line or two."""
    codes: tuple[str, ...] = ()
    """Checks whose pages lead on, the nearest first."""
