"""Lists of a saved report with an incomplete element, which count as not recorded.

A layer without a name, or a shape without its time, was written by hand or damaged. Nothing can be said of
such an element, and sums over the others would be wrong.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar, get_args

import msgspec

from fp8doctor.facts.network import Attention, Blocks, Linear, SavedWeight, Scaling
from fp8doctor.facts.record import Record
from fp8doctor.facts.training import Checkpointing, CompileMark
from fp8doctor.facts.trial import (
    Arm,
    KernelGroup,
    LayerGemm,
    LayerNumerics,
    LayerShape,
    ModuleTime,
)
from fp8doctor.facts.unrecorded import NOT_RECORDED, recorded

R = TypeVar("R", bound=Record)

ESSENTIAL: dict[type[Record], tuple[str, ...]] = {
    Linear: ("name", "kind", "stack"),
    Blocks: ("name",),
    Scaling: ("stack", "layers", "first"),
    Attention: ("name", "kind", "implementation"),
    SavedWeight: ("weight_class", "tried"),
    CompileMark: ("name", "form"),
    Checkpointing: ("name", "form"),
    Arm: ("name", "tried", "reason"),
    KernelGroup: ("name", "family", "count", "time_ms"),
    ModuleTime: ("name", "kind", "families_ms"),
    LayerShape: ("m", "k", "n", "recipe", "layers", "bf16_ms", "fp8_ms", "casts_ms", "reason"),
    LayerGemm: ("layout", "bf16_ms", "fp8_ms"),
    LayerNumerics: (
        "name",
        "output_sqnr_db",
        "input_gradient_sqnr_db",
        "weight_gradient_sqnr_db",
        "saturated_pct",
        "flushed_pct",
        "non_finite",
    ),
}
"""Kind of an element -> the facts that every version of fp8doctor has written of it."""


def without_incomplete_lists(record: R, gaps: dict[str, str], path: str = "") -> R:
    """Return the record without lists that hold an incomplete element.

    ``gaps`` takes their paths, each with the reason.
    """
    changed: dict[str, Any] = {}
    for name in _holds_records(type(record)):
        if not recorded(record, name):
            continue
        value, inner = getattr(record, name), f"{path}.{name}".removeprefix(".")
        if isinstance(value, Record):
            now: Any = without_incomplete_lists(value, gaps, inner)
        elif isinstance(value, tuple):
            now = tuple(without_incomplete_lists(each, gaps, inner) for each in value)
            if (lacks := next(filter(None, map(_lacks, now)), None)) is not None:
                now, gaps[inner] = NOT_RECORDED, f"an element of this list has no {lacks}"
            elif all(one is other for one, other in zip(now, value, strict=True)):
                now = value
        else:
            continue
        if now is not value:
            changed[name] = now
    return msgspec.structs.replace(record, **changed) if changed else record


def _lacks(element: Record) -> str | None:
    """Name what an element lacks; None if it has all that is essential."""
    if isinstance(element, Arm) and recorded(element, "tried") and element.tried:
        return "step_ms" if not recorded(element, "step_ms") else _first_missing(element)
    return _first_missing(element)


def _first_missing(element: Record) -> str | None:
    names = ESSENTIAL.get(type(element), ())
    return next((name for name in names if not recorded(element, name)), None)


@functools.cache
def _holds_records(kind: type[Record]) -> tuple[str, ...]:
    """Name the fields that may hold records."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if _of_records(field.type))


def _of_records(annotation: Any) -> bool:
    return (isinstance(annotation, type) and issubclass(annotation, Record)) or any(
        map(_of_records, get_args(annotation))
    )
