"""The names that a piece of the user's code uses, read without running it."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names used by a function and by the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def owners(name: str, code: CodeType) -> Iterator[str]:
    """Yield what a function, and those inside it, read this name from: ``te`` of ``te.autocast``, and the
    name itself where it stands alone."""
    for before, instruction in pairwise(dis.get_instructions(code)):
        if instruction.argval == name and instruction.opname.startswith("LOAD_"):
            of_something = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield str(before.argval) if of_something else name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from owners(name, constant)
