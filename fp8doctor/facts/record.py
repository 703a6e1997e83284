"""The one constructor and codec of all records that are saved.

When a record is made, prose loses its secrets, a non-finite number becomes ``None`` (text in evidence), an
``int`` in a float field a float, and a lone surrogate U+FFFD. Keys that this version does not know are kept.
Reading a fact that was not recorded raises `Unrecorded`.
"""

import codecs
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar, get_args

import msgspec

from fp8doctor.facts.scrub import without_secrets
from fp8doctor.signals import signals_deferred

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
    for name in _parts_of(path):
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
def _parts_of(path: str) -> tuple[str, ...]:
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


Value = int | float | str | bool | None
"""One piece of evidence; a number's unit stands in its key (``_ms``, ``_gib``, ``_pct``)."""

Prose: TypeAlias = Annotated[str, msgspec.Meta(extra={"prose": True})]
"""Free text that may quote what a user's code or a machine said. The constructor takes the secrets out of it,
whoever wrote it; names of modules, classes and kernels are not prose and stay as they are."""

R = TypeVar("R", bound="Record")

_one_thread = threading.RLock()


@contextmanager
def _first_use() -> Iterator[None]:
    """Guard the possible first use of a type, when msgspec (0.22.0) builds its layout.

    A second thread would read half of a layout and crash the process; and an exception of a signal's handler,
    such as KeyboardInterrupt, would be lost in the hash of an annotation.
    """
    with signals_deferred(), _one_thread:
        yield


class UnreadableDocument(ValueError):
    """A saved document cannot be read back; the message says why in one sentence."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen record of plain values, each settled on construction."""

    def __post_init__(self) -> None:
        values = msgspec.structs.astuple(self)
        for (field, is_float, is_prose), value in zip(_layout(type(self)), values, strict=True):
            kind = type(value)
            if kind in SETTLED or (kind is int and not is_float):
                continue
            if kind is str and not is_prose and value.isascii():
                continue
            settled = float(value) if kind is int else settle(value, is_float, is_prose)
            if settled is not value:
                msgspec.structs.force_setattr(self, field, settled)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the fact at a dotted path, or ``default`` if it was not recorded."""
        return value_at(self, path, default)


SETTLED = frozenset({bool, type(None), type(NOT_RECORDED)})
"""Types whose values are as JSON holds them, whatever the field."""


@functools.cache
def _layout(kind: type[Record]) -> tuple[tuple[str, bool, bool], ...]:
    """List each field: name, is a float, holds prose. No record exists before its facts are guarded here."""
    with _first_use():
        fields = msgspec.structs.fields(kind)
        guard(kind, fields)
        return tuple(
            (field.name, field.type in (float, float | None), _holds_prose(field.type)) for field in fields
        )


def _holds_prose(annotation: Any) -> bool:
    return annotation == Prose or any(map(_holds_prose, get_args(annotation)))


def settle(value: Any, number_field: bool = False, prose: bool = False) -> Any:
    """Return the value as JSON can hold it, prose without what is a secret by its shape.

    A non-finite number is None in a number field, text elsewhere.
    """
    kind = type(value)
    if kind is str:
        value = value if value.isascii() else value.encode("utf-8", "replace_surrogate").decode("utf-8")
        return without_secrets(value) if prose else value
    if kind is float and not math.isfinite(value):
        return None if number_field else str(value)
    if kind is dict:
        return {settle(key): settle(item, prose=prose) for key, item in value.items()}
    if kind is list or (kind is tuple and value and not isinstance(value[0], Record)):
        return tuple(settle(item, prose=prose) for item in value)
    return value


def _replace_surrogate(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "\N{REPLACEMENT CHARACTER}".encode() * (error.end - error.start), error.end


codecs.register_error("replace_surrogate", _replace_surrogate)


def to_builtins(record: Record) -> dict[str, Any]:
    """Return a record as dicts, lists and plain values, in the order of its fields."""
    return msgspec.json.decode(msgspec.json.encode(record), type=dict[str, Any])


def from_builtins(kind: type[R], data: Any) -> R:
    """Return a record from plain values. Raises `UnreadableDocument` for a wrong key."""
    try:
        with _first_use():
            return msgspec.convert(data, type=kind)
    except msgspec.ValidationError as error:
        raise UnreadableDocument(f"its {kind.__name__.lower()} have another format: {error}") from None


def schema_of(kind: type[Record], title: str) -> dict[str, Any]:
    """Return the JSON Schema of a record, with the docstrings as descriptions."""
    document = msgspec.json.schema(kind)
    for each in document["$defs"].values():
        each["description"] = " ".join(each["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **document}


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder of JSON lines of this type, or of one of these types."""
    with _first_use():
        return msgspec.json.Decoder(kind)


def encode(document: Any) -> bytes:
    """Return a JSON document, indented by two, the same bytes for the same content."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode(text: bytes) -> Any:
    """Return the plain values of a JSON document.

    Raises `UnreadableDocument` if it is not JSON, or nested too deep.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise UnreadableDocument("it is nested too deep to be a report") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise UnreadableDocument(f"it is not JSON ({error})") from None


def unknown_keys(data: Any, known: Any) -> dict[str, Any] | None:
    """Return the part that ``known``, this version's copy, does not carry; in a list the index is the key."""
    if data == known or type(data) is not type(known) or not isinstance(data, (dict, list)):
        return None
    both = data if isinstance(data, dict) else {str(at): value for at, value in enumerate(data)}
    old = known if isinstance(known, dict) else {str(at): value for at, value in enumerate(known)}
    kept = {}
    for key, value in both.items():
        if key in old:
            if inner := unknown_keys(value, old[key]):
                kept[key] = inner
        elif isinstance(data, dict):
            kept[key] = value  # null is a value too
    return kept or None


def restore_unknown_keys(data: Any, unknown: Any) -> Any:
    """Invert `unknown_keys`: put the kept keys back, after the known ones."""
    if not isinstance(unknown, dict):
        return data
    if isinstance(data, list):
        return [restore_unknown_keys(value, unknown.get(str(at))) for at, value in enumerate(data)]
    known = {key: restore_unknown_keys(value, unknown.get(key)) for key, value in data.items()}
    return known | {key: value for key, value in unknown.items() if key not in data}
