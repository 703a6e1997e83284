"""The names that a piece of the user's code uses, read without running it."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names used by a function and by the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
