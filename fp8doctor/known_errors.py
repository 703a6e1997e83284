"""Recognize common messages of FP8 jobs: cause, what to do, versions, source."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from fp8doctor.code_snippets import with_imports

LONGEST = 1_000_000
"""Longest text to search, in characters from its end: a fatal error comes last."""

CUTEDSL = {
    "apache-tvm-ffi": "apache-tvm-ffi",
    "nvidia-cutlass-dsl": "nvidia-cutlass-dsl==4.5.2 nvidia-cutlass-dsl-libs-base==4.5.2 "
    "nvidia-cutlass-dsl-libs-cu13==4.5.2",
}
"""Package that torchao's MXFP8 casts of experts need -> package to install.

Source: METADATA of torchao 0.18.0.
"""


class KnownError(NamedTuple):
    """A message that a library raises or logs in FP8 jobs."""

    says: str
    """The message, with ... for the variable parts."""
    pattern: str
    """Regular expression for the text with all whitespace normalized to single blanks."""
    cause: str
    lines: str
    """The fix, as lines to write."""
    versions: str
    source: str
    """File and version that contain the text, or the cause of the message."""
    codes: tuple[str, ...] = ()
    """Checks that find the cause in advance."""


def _read() -> tuple[KnownError, ...]:
    table = tomllib.loads(Path(__file__).with_name("known_errors.toml").read_text("utf-8"))
    return tuple(
        KnownError(**{**each, "lines": with_imports(each["lines"]), "codes": tuple(each.get("codes", ()))})
        for each in table["error"]
    )


KNOWN_ERRORS = _read()


def recognise(text: str) -> tuple[KnownError, ...]:
    """Find the known messages in a text, in order, however its lines are wrapped."""
    text = " ".join(text[-LONGEST:].split())
    found = [(match.start(), error) for error in KNOWN_ERRORS if (match := re.search(error.pattern, text))]
    return tuple(error for _, error in sorted(found, key=lambda each: each[0]))


def in_a_sentence(text: str) -> str | None:
    """Explain the last known message in a text and name its page; None without one."""
    found = recognise(text)
    if not found:
        return None
    return f"{found[-1].cause} More: fp8doctor explain {found[-1].codes[0] if found[-1].codes else 'TEXT'}"
