"""Names that the user's code uses, read without running it."""

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from fp8doctor.stacks.looking import home, is_a, read
from fp8doctor.stacks.torch_private import original

LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "transformer_engine.", "torchao.")
"""Packages whose forwards check a flag or wrapper; their code is not searched."""


def from_library(kind: type) -> bool:
    return f"{home(kind)}.".startswith(LIBRARIES)


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def named(
    function: Any, classes: tuple[type, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield every name that a user's function uses, with its value.

    Follows functions, partials and methods of ``classes``. A name only makes a call possible.
    """
    function = read(function, "__func__", function)
    seen = set() if seen is None else seen
    if function is None or id(function) in seen:
        return
    seen.add(id(function))
    held: list[tuple[str, Any]] = [("", read(function, "func")), ("", wrapped(function))]
    if is_own(function) or read(function, "__wrapped__") is not None:
        cells = read(function, "__closure__") or ()
        held += (("", cell.cell_contents) for cell in cells if cell != type(cell)())
    if is_own(function):
        for name in names_in(function.__code__):
            held.append((name, function.__globals__.get(name)))
            held += ((name, vars(kind)[name]) for kind in classes if name in vars(kind))
    for name, value in held:
        yield name, value
        if any(is_a(value, kind) for kind in (FunctionType, MethodType, functools.partial)):
            yield from named(value, classes, seen)


def is_own(function: Any) -> bool:
    home = function.__globals__.get("__name__", "") if type(function) is FunctionType else ""
    return type(function) is FunctionType and not f"{home}.".startswith(LIBRARIES)


def wrapped(function: Any) -> Any:
    """Return the function inside ``torch.compile`` or a library's wrapper, or None."""
    inner = original(function)
    return read(function, "__wrapped__") if inner is None and not is_own(function) else inner
