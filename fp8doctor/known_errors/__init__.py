"""The commonest messages of FP8 jobs by their text: cause, what to do, versions, source."""

from __future__ import annotations

import re

from fp8doctor.known_errors.hugging_face import HUGGING_FACE
from fp8doctor.known_errors.known_error import KnownError
from fp8doctor.known_errors.loading import LOADING
from fp8doctor.known_errors.torch_and_torchao import CUTEDSL, TORCH_AND_TORCHAO
from fp8doctor.known_errors.transformer_engine import TRANSFORMER_ENGINE
from fp8doctor.lines import with_imports

__all__ = ["CUTEDSL", "KNOWN_ERRORS", "LONGEST", "KnownError", "in_a_sentence", "recognise"]

KNOWN_ERRORS: tuple[KnownError, ...] = tuple(
    each._replace(lines=with_imports(each.lines))
    for each in (*TORCH_AND_TORCHAO, *LOADING, *TRANSFORMER_ENGINE, *HUGGING_FACE)
)

LONGEST = 1_000_000
"""Characters at the end of a text that are looked at: what ended a program stands last."""


def recognise(text: str) -> tuple[KnownError, ...]:
    """Find the known messages in a text, however its lines are wrapped, in the order in which they stand
    there."""
    text = " ".join(text[-LONGEST:].split())
    found = [(match.start(), error) for error in KNOWN_ERRORS if (match := re.search(error.pattern, text))]
    return tuple(error for _, error in sorted(found, key=lambda each: each[0]))


def in_a_sentence(text: str) -> str | None:
    """Tell the cause of the last known message in a text, and where more stands; None when none is known."""
    found = recognise(text)
    if not found:
        return None
    return f"{found[-1].cause} More: fp8doctor explain {found[-1].codes[0] if found[-1].codes else 'TEXT'}"
