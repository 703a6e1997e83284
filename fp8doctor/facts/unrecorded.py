"""Reading a fact that was not recorded raises `Unrecorded`."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import msgspec

NOT_RECORDED: Any = msgspec.UNSET
"""The default of every fact: nobody looked, or the recording is older than the fact. Not the same as
``None``."""

P = ParamSpec("P")
F = TypeVar("F")
T = TypeVar("T")


class Unrecorded(Exception):
    """A fact was read that was not recorded."""

    def __init__(self, kind: type, field: str, reason: str | None = None) -> None:
        super().__init__(f"{kind.__name__}.{field} was not recorded")
        self.kind, self.field, self.reason = kind, field, reason


class Fact(property):
    """A field whose value may be missing, in place of msgspec's member."""

    def __init__(self, member: Any, kind: type, field: str) -> None:
        stored = self.stored = member.__get__

        def read(record: Any) -> Any:
            if (value := stored(record)) is not NOT_RECORDED:
                return value
            raise Unrecorded(kind, field)

        super().__init__(read, member.__set__)


def guard(kind: type[msgspec.Struct], fields: Iterable[msgspec.structs.FieldInfo]) -> None:
    """Make every field of this type that may be missing raise if it is read so."""
    for field in fields:
        member = getattr(kind, field.name)
        if field.default is NOT_RECORDED and not isinstance(member, Fact):
            type.__setattr__(kind, field.name, Fact(member, kind, field.name))


def value_at(record: msgspec.Struct | None, path: str, default: Any = None) -> Any:
    """Return the fact at a dotted path, or the default, also beyond a None; AttributeError for no fact."""
    for name in _names(path):
        if record is None:
            return default
        record = getattr(type(record), name).stored(record)
        if record is NOT_RECORDED:
            return default
    return record


def recorded(record: msgspec.Struct | None, path: str) -> bool:
    """Return whether every fact along a dotted path was recorded."""
    return value_at(record, path, NOT_RECORDED) is not NOT_RECORDED


@functools.cache
def _names(path: str) -> tuple[str, ...]:
    """Split a dotted path; the program has a few hundred."""
    return tuple(path.split("."))


def if_recorded(answer: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
    """Return the answer; None if it reads a fact that was not recorded."""
    try:
        return answer(*arguments, **named)
    except Unrecorded:
        return None


def once(answer: Callable[[F], T]) -> Callable[[F], T]:
    """Compute an answer once of the same `fp8doctor.facts.Facts`, which never change and keep it."""
    name = f"{answer.__module__}.{answer.__name__}"

    @functools.wraps(answer)
    def kept(facts: F) -> T:
        known: dict[str, T] = facts.__dict__
        if name not in known:
            known[name] = answer(facts)
        return known[name]

    return kept
