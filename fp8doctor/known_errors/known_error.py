"""What is known of a message."""

from __future__ import annotations

from typing import NamedTuple


class KnownError(NamedTuple):
    """A message that a library raises or logs in FP8 jobs."""

    says: str
    """Its words, with ... for what changes."""
    pattern: str
    """Regular expression for it, in a text whose blanks and line ends are one blank each."""
    cause: str
    lines: str
    """What to do, as the lines that a user would write."""
    versions: str
    source: str
    """File and version in which the text was read, or what raised it."""
    codes: tuple[str, ...] = ()
    """Checks that find the cause before it is raised."""
