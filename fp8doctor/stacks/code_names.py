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
    return (owner or name for owner, each in loads(code) if each == name)


def loads(code: CodeType) -> Iterator[tuple[str | None, str]]:
    """Yield every name that a function, and those inside it, read, behind what it is read from; None before
    one that stands alone."""
    for before, instruction in pairwise(dis.get_instructions(code)):
        if instruction.opname.startswith("LOAD_") and instruction.opname != "LOAD_CONST":
            of_something = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield _last(before.argval) if of_something else None, _last(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from loads(constant)


def _last(argument: object) -> str:
    """From Python 3.13 on one instruction may load two names."""
    return str(argument[-1] if isinstance(argument, tuple) else argument)
