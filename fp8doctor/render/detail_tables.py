"""The table of layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from fp8doctor.analysis.layers import flops_share_pct, layer_label
from fp8doctor.facts import Blocks, Facts, LayerShape, Linear, recorded
from fp8doctor.wording import percent, plural

MOST_ROWS = 200
"""Rows of the table; a model whose layers all differ has more, and they are counted."""

REST, WHOLE = "Outside of repeated blocks", "The whole model"


class LayerRow(Struct, frozen=True):
    """Layers that differ in nothing but their numbers."""

    name: str
    """With ``*`` for each number."""
    count: int
    shape: str
    runs_in: str
    compiled: str
    flops: str
    """Share of the model's matmul FLOPs; empty if it is not known."""
    alone: str
    """Time of one of them alone, BF16 against FP8 and its casts; empty if it was not timed."""


class LayerGroup(Struct, frozen=True):
    """The rows of one kind of block."""

    title: str
    rows: tuple[LayerRow, ...]


class LayerTable(Struct, frozen=True):
    """All Linears of the model."""

    groups: tuple[LayerGroup, ...]
    left_out: str
    """Number of rows that are not shown; empty if all are."""

    @property
    def alone(self) -> bool:
        """Return whether any layer was timed alone."""
        return any(row.alone for group in self.groups for row in group.rows)


def layer_table(facts: Facts) -> LayerTable | None:
    """Group the Linears by kind of block; None without a model or Linears."""
    if not facts.get("network.linears"):
        return None
    blocks = facts.blocks()
    alike: dict[tuple[str, ...], list[Linear]] = {}
    for linear in facts.network.linears:
        alike.setdefault(_kind(linear, blocks), []).append(linear)
    shapes = _shapes(facts)
    groups: dict[str, list[LayerRow]] = {}
    for (block, name, *_), members in list(alike.items())[:MOST_ROWS]:
        groups.setdefault(block, []).append(_row(name, members, facts, shapes))
    titles = {each.name: _title(each) for each in blocks}
    others = REST if blocks else WHOLE
    more = len(alike) - MOST_ROWS
    return LayerTable(
        tuple(LayerGroup(titles.get(block, others), tuple(rows)) for block, rows in groups.items()),
        f"{plural(more, 'more kind')} of layers." if more > 0 else "",
    )


def _kind(linear: Linear, blocks: Sequence[Blocks]) -> tuple[str, ...]:
    """Tell what the layers of one row have in common, block and name within it first."""
    name = linear.get("name", "")
    block = next((each.name for each in blocks if name.startswith(f"{each.name}.")), None)
    within = name.removeprefix(f"{block}.").partition(".")[2] if block is not None else name
    return (
        block if block is not None else "\0",
        re.sub(r"(?<![^.])\d+(?![^.])", "*", within or name),
        _layer_shape(linear),
        _runs_in(linear),
        _compiled(linear),
    )


def _title(blocks: Blocks) -> str:
    kind = blocks.get("kind", "block").rpartition(".")[2]
    count = f"{blocks.count} x " if recorded(blocks, "count") else ""
    return f"{blocks.name}: {count}{kind}"


def _row(name: str, members: Sequence[Linear], facts: Facts, shapes: dict[str, LayerShape]) -> LayerRow:
    first = members[0]
    alone = next((shapes[each.name] for each in members if each.name in shapes), None)
    return LayerRow(
        name=name,
        count=len(members),
        shape=_layer_shape(first),
        runs_in=_runs_in(first),
        compiled=_compiled(first),
        flops=percent(share) if (share := flops_share_pct(members, facts)) else "",
        alone=_alone(alone) if alone else "",
    )


def _layer_shape(linear: Linear) -> str:
    if not recorded(linear, "in_features") or not recorded(linear, "out_features"):
        return "unknown"
    times = f"{linear.gemms} x " if linear.get("gemms", 1) > 1 else ""
    return f"{times}{linear.in_features} → {linear.out_features}"


def _runs_in(linear: Linear) -> str:
    use = linear.get("use")
    if use == "none":
        return str(linear.get("dtype", "not FP8"))
    recipe = linear.get("recipe") or ""
    if use == "training":
        idle = linear.get("engaged") is False
        return " ".join(filter(None, ("FP8", recipe, layer_label(linear), "(not engaged)" * idle)))
    return f"weights only ({layer_label(linear)})" if use == "storage" else "unknown"


def _compiled(linear: Linear) -> str:
    return "unknown" if not recorded(linear, "compiled") else "no" if linear.compiled is None else "yes"


def _shapes(facts: Facts) -> dict[str, LayerShape]:
    """Return the matmuls that were timed alone, by each layer that has them."""
    timed = facts.get("trial.shapes", ())
    return {name: each for each in timed for name in each.get("layers", ())}


def _alone(shape: LayerShape) -> str:
    bf16 = f"{shape.bf16_ms:.2f}"
    if shape.get("fp8_ms") is None:
        return bf16
    casts = f" + {shape.casts_ms:.2f}" if shape.get("casts_ms") is not None else ""
    return f"{bf16} | {shape.fp8_ms:.2f}{casts}"
