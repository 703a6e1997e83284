"""The Linears of a model as rows, those that differ in nothing but their numbers together; and one alone."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.layers import flops_share_pct, layer_label
from fp8doctor.analysis.step_difference import signed
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16
from fp8doctor.cost.matmuls import rows_of
from fp8doctor.diagnosis.document import SCHEMA_VERSION, Document, Tool
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.wording import percent, quoted

HEADS = ("layer", "count", "shape", "FLOPs", "FP8 ms", "compiled")
"""Of a row, besides what it runs in."""

LEGEND = (
    "FP8 ms: what FP8 changes of a step in these layers, compiled, estimated. Compiled: under torch.compile. "
    "- is not known."
)


def layer_rows(linears: Iterable[Linear], facts: Facts) -> tuple[tuple[str, ...], ...]:
    """Describe layers, a row for each kind: the cells of `HEADS`, then what it runs in."""
    alike: dict[tuple[str, ...], list[Linear]] = {}
    for each in linears:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.get("name", ""))
        compiled = "-" if not recorded(each, "compiled") else "no" if each.compiled is None else "yes"
        alike.setdefault((name, layer_shape(each), compiled, runs_in(each, facts)), []).append(each)
    gained, rows = if_recorded(gains, facts) or {}, []
    for (name, shape, compiled, how), members in alike.items():
        names = [each.get("name", "") for each in members]
        found = [gained[each] for each in names if each in gained]
        share = if_recorded(flops_share_pct, members, facts)
        costs = signed(-sum(each.ms for each in found), 2) if found else "-"
        rows.append((name, str(len(members)), shape, percent(share) if share else "-", costs, compiled, how))
    return tuple(rows)


def layer_shape(linear: Linear) -> str:
    """Write the sides of a layer's weight: 1024 → 4096."""
    if not recorded(linear, "in_features") or not recorded(linear, "out_features"):
        return "-"
    several = f"{linear.gemms} x " if linear.get("gemms", 1) > 1 else ""
    return f"{several}{linear.in_features} → {linear.out_features}"


def runs_in(linear: Linear, facts: Facts) -> str:
    """Name the precision that a layer computes in: in 16 or 32 bits that of the step's autocast, if any."""
    use, label = linear.get("use"), if_recorded(layer_label, linear)
    if use == "training":
        idle = "(not engaged)" if linear.get("engaged") is False else ""
        return " ".join(filter(None, ("FP8", linear.get("recipe"), label, idle)))
    autocast = facts.get("training.autocast") if use == "none" else None
    dtype = autocast or str(linear.get("dtype", "not FP8" if use == "none" else "unknown"))
    return f"{dtype}, weights only ({label or 'unknown'})" if use == "storage" else dtype


class LayerReport(Record, frozen=True, kw_only=True):
    """One layer. What is None, or empty, is not known."""

    tool: Tool
    seen: Linear
    rows: int | None
    """Rows of one call."""
    gain_ms: float | None
    """FP8's saving of a step in this layer, compiled, modelled; negative if it costs."""
    advised: tuple[str, ...]
    """Findings that name the layer, and steps of the plan that change it."""
    keep_in_bf16: bool
    """True if the plan keeps it in BF16."""

    def to_json(self) -> str:
        data = {"schema_version": SCHEMA_VERSION, "kind": "layer", **to_builtins(self)}
        return encode(data).decode()


def named(asked: str, facts: Facts) -> Linear:
    """Find the layer of this name, or the only one with this part of a name. Raises `UserError` otherwise."""
    linears = [each for each in facts.linears() if recorded(each, "name") and recorded(each, "kind")]
    if not linears:
        raise UserError("this report holds no layers: no model was examined")
    part = f".{asked.strip('.')}."
    found = [each for each in linears if each.name == asked]
    found = found or [each for each in linears if part in f".{each.name}."]
    if len(found) == 1:
        return found[0]
    names = [each.name for each in found or linears]
    near = ", ".join(names[:3] if found else get_close_matches(asked, names, cutoff=0.5) or names[:1])
    count = f"{len(found) or 'none'} of the {len(linears)} linear layers"
    raise UserError(quoted(f"{count} have the name {asked}; did you mean {near}?"))


def layer_report(linear: Linear, document: Document) -> LayerReport:
    facts, plan, name = document.facts, document.prescription, linear.name
    gain = (if_recorded(gains, facts) or {}).get(name)
    changed = [(step.title, step.treatment) for step in plan if not step.code]
    fixable = ((f"{each.code}: {each.title}", each.treatment) for each in document.findings)
    changed += [(title, treatment) for title, treatment in fixable if treatment]
    kept = {name for step in plan if step.treatment.name == KEEP_IN_BF16 for name in step.treatment.layers}
    return LayerReport(
        tool=document.tool,
        seen=linear,
        rows=if_recorded(rows_of, linear, facts),
        gain_ms=gain.ms if gain else None,
        advised=tuple(title for title, treatment in changed if name in treatment.layers),
        keep_in_bf16=name in kept,
    )
