"""A checkpoint, or the difference of two, as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec

from fp8doctor.checkpoints.conclusions import Change, Conclusions, Statement
from fp8doctor.checkpoints.headers import Checkpoint
from fp8doctor.render.table_page import Code, Sheet, Table
from fp8doctor.version import VERSION
from fp8doctor.wording import plural

BASIS = "Read from the headers alone: nothing was loaded, unpickled or imported, and no number was read."

MOST_NAMES = 3


def page(found: Checkpoint, told: Conclusions) -> Sheet:
    """Lay out one checkpoint."""
    heading = (f"fp8doctor {VERSION}", found.name, found.form, plural(len(found.tensors), "tensor"))
    parts: list[Table | Code | str] = []
    if told.kinds:
        rows = tuple((each.what, str(each.count), each.scaling, each.first) for each in told.kinds)
        parts.append(Table(("in", "tensors", "scales"), rows, "first"))
    parts.append("What will not load" if told.problems else "Nothing in the headers keeps it from loading.")
    parts += [*_statements(told.problems), "Export", *_statements(told.export)]
    return Sheet(heading, (told.summary,), tuple(parts), BASIS)


def _statements(statements: Sequence[Statement]) -> Iterator[Code | str]:
    for each in statements:
        yield f"- {each.text}"
        if each.code:
            yield Code(each.code)


def comparison(one: Checkpoint, other: Checkpoint, changes: Sequence[Change]) -> Sheet:
    """Lay out how two checkpoints differ."""
    alike = f"All {plural(len(one.tensors), 'tensor')} have the same names, dtypes and shapes."
    told = "; ".join(f"{plural(len(each.names), 'tensor')}: {each.what}" for each in changes)
    rows = tuple((each.what, str(len(each.names)), ", ".join(each.names[:MOST_NAMES])) for each in changes)
    parts = (Table(("change", "tensors"), rows, "first"),) if changes else ()
    heading = (f"fp8doctor {VERSION}", f"{one.name} and {other.name}")
    return Sheet(heading, (f"{told}." if changes else alike,), parts, BASIS)


def as_json(found: Sequence[Checkpoint], told: Sequence[Conclusions], changes: Sequence[Change]) -> str:
    files = [
        {"name": each.name, "form": each.form, **msgspec.to_builtins(conclusions)}
        for each, conclusions in zip(found, told, strict=True)
    ]
    return json.dumps({"checkpoints": files, "changes": msgspec.to_builtins(list(changes))}, indent=2)
