"""Everything in a report about one layer: seen, counted, timed, compared, advised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16
from fp8doctor.cost import rows_of
from fp8doctor.diagnosis.document import SCHEMA_VERSION, Document, Tool
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, LayerShape, Linear, ModuleTime, if_recorded
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.finding import Basis
from fp8doctor.wording import quoted


class LayerReport(Record, frozen=True, kw_only=True):
    """One layer. What is None, or empty, is not known."""

    tool: Tool
    seen: Linear
    rows: int | None
    """Rows of one call."""
    alike: tuple[str, ...]
    """The other layers of its shape and recipe that were timed with it."""
    shape: LayerShape | None
    """Its matmuls alone, as they were timed."""
    gain_ms: float | None
    """FP8's saving of a step in this layer; negative if it costs."""
    gain_basis: Basis | None
    """Of its matmuls and casts alone; if only the casts are modelled, measured."""
    modules: dict[str, ModuleTime]
    """Variant -> its time in the profiled step; a cut keeps its first blocks' names."""
    advised: tuple[str, ...]
    """Findings that name the layer, and steps of the plan without a finding that do."""
    advised_for_all: tuple[str, ...]
    """Steps of the plan that name no layers: they are for the whole model."""
    keep_in_bf16: bool
    """True if the plan keeps it in BF16."""


def as_json(layers: Sequence[LayerReport]) -> str:
    written = [to_builtins(each) for each in layers]
    data = written[0] if len(written) == 1 else {"layers": written}
    return encode({"schema_version": SCHEMA_VERSION, "kind": "layer", **data}).decode()


def named(asked: str, facts: Facts) -> tuple[Linear, ...]:
    """Find layers by name, pattern or part of one. Raises `UserError` without any."""
    linears = facts.get("network.linears", ())
    if not linears:
        raise UserError("this report holds no layers: no model was examined")
    exact = tuple(each for each in linears if each.name == asked)
    found = exact or tuple(each for each in linears if _is_meant(asked, each.name))
    if found:
        return found
    names = [each.name for each in linears]
    near = get_close_matches(asked, names, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else f"; the first is {names[0]}"
    raise UserError(quoted(f"none of the {len(names)} linear layers is called {asked}{hint}"))


def _is_meant(asked: str, name: str) -> bool:
    if any(mark in asked for mark in "*?["):
        return fnmatchcase(name, asked) or fnmatchcase(name, f"*.{asked}")
    return f".{asked.strip('.')}." in f".{name}."


def layer_reports(linears: Iterable[Linear], document: Document) -> list[LayerReport]:
    """Collect all that is known of some layers."""
    facts, plan, found = document.facts, document.prescription, []
    gained = if_recorded(gains, facts) or {}
    timed = [(arm.get("name"), module) for arm in facts.arms() for module in arm.get("breakdown.modules", ())]
    for linear in linears:
        name, gain = linear.name, gained.get(linear.name)
        shapes = (each for each in facts.get("trial.shapes", ()) if name in each.get("layers", ()))
        shape = next(shapes, None)
        kept = (each.treatment.layers for each in plan if each.treatment.name == KEEP_IN_BF16)
        report = LayerReport(
            tool=document.tool,
            seen=linear,
            rows=if_recorded(rows_of, linear, facts),
            alike=tuple(each for each in shape.layers if each != name) if shape else (),
            shape=shape,
            gain_ms=gain.ms if gain else None,
            gain_basis=("measured" if gain.measured else "modelled") if gain else None,
            modules={variant: module for variant, module in timed if module.name == name},
            advised=tuple(_advice(name, document)),
            advised_for_all=tuple(step.treatment.summary for step in plan if not step.treatment.layers),
            keep_in_bf16=any(name in layers for layers in kept),
        )
        found.append(report)
    return found


def _advice(name: str, document: Document) -> Iterator[str]:
    """Find findings that name the layer, those first that change it, and steps without a finding that do."""
    changes, names = [], []
    for each in document.findings:
        values = (value if isinstance(value, tuple) else (value,) for value in each.evidence.values())
        if each.treatment and name in each.treatment.layers:
            changes.append(f"{each.code}: {each.title}")
        elif any(name == part for value in values for part in value):
            names.append(f"{each.code}: {each.title}")
    yield from changes or names
    for step in document.prescription:
        if not step.code and name in step.treatment.layers:
            yield step.title
