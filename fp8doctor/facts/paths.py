"""Where a fact stands: its dotted path from the root, as reports and gaps name it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from fp8doctor.facts import Facts
from fp8doctor.facts.record import Record
from fp8doctor.facts.unrecorded import Unrecorded


def path_of(missing: Unrecorded) -> str:
    """Return the path of the fact that was read: ``network.linears.compiled``."""
    place = _places().get(missing.kind, missing.kind.__name__)
    return f"{place}.{missing.field}" if place else missing.field


@functools.cache
def _places() -> dict[type, str]:
    """Type of a record -> the path at which it stands in the facts, each once."""
    places: dict[type, str] = {Facts: ""}
    pending: list[type[Record]] = [Facts]
    while pending:
        kind = pending.pop()
        for field in msgspec.structs.fields(kind):
            for inner in _records(field.type):
                if inner not in places:
                    places[inner] = f"{places[kind]}.{field.name}".removeprefix(".")
                    pending.append(inner)
    return places


def _records(annotation: Any) -> Iterator[type[Record]]:
    """List the records that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation
    for inner in get_args(annotation):
        yield from _records(inner)
