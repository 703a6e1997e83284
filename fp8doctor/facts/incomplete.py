"""What every version of fp8doctor has written of the elements of a saved report.

A layer without a name, or a shape without its time, was written by hand or damaged. Nothing can be said of
such an element, and sums over the others would be wrong.
"""

from __future__ import annotations

from fp8doctor.facts.network import Attention, Blocks, Linear, SavedWeight, Scaling
from fp8doctor.facts.record import Record
from fp8doctor.facts.training import Checkpointing, CompileMark
from fp8doctor.facts.trial import (
    Arm,
    KernelGroup,
    LayerGemm,
    LayerShape,
    ModuleTime,
)
from fp8doctor.facts.unrecorded import recorded

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
}
"""Kind of an element -> the facts that every version of fp8doctor has written of it."""


def missing_fact(record: Record, path: str = "") -> str:
    """Return the path of the first essential fact that an element lacks; empty if none does."""
    essential = ESSENTIAL.get(type(record), ())
    if isinstance(record, Arm) and record.get("tried"):
        essential = (*essential, "step_ms")
    for name in essential:
        if not recorded(record, name):
            return f"{path}.{name}"
    for name in record.__struct_fields__:
        value = getattr(record, name) if recorded(record, name) else None
        for each in value if isinstance(value, tuple) else (value,):
            inner = f"{path}.{name}" if path else name
            if isinstance(each, Record) and (missing := missing_fact(each, inner)):
                return missing
    return ""
