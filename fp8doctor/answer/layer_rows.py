"""The Linears of a model as rows: those that differ in nothing but their numbers together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from fp8doctor.analysis.layer_gain import Gain, gains
from fp8doctor.analysis.layers import flops_share_pct, layer_label
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, LayerShape, Linear, if_recorded, recorded
from fp8doctor.wording import percent

HEADS = ("layer", "count", "shape", "FLOPs", "FP8 ms", "alone ms", "compiled")
"""Of a row, besides what it runs in."""

LEGEND = (
    "FP8 ms: what FP8 changes of a step in these layers. Alone: the matmuls of one of them, in BF16 | in FP8 "
    "+ its casts. - is not known."
)


def layer_rows(linears: Iterable[Linear], facts: Facts) -> tuple[tuple[str, ...], ...]:
    """Describe layers, a row for each kind: the cells of `HEADS`, then what it runs in."""
    alike: dict[tuple[str, ...], list[Linear]] = {}
    for each in linears:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.get("name", ""))
        alike.setdefault((name, layer_shape(each), _compiled(each), runs_in(each)), []).append(each)
    gained: dict[str, Gain] = {}
    with suppress(UserError):  # a GPU without a datasheet
        gained = if_recorded(gains, facts) or {}
    shapes = {name: each for each in facts.get("trial.shapes", ()) for name in each.get("layers", ())}
    rows = []
    for (name, shape, compiled, how), members in alike.items():
        names = [each.get("name", "") for each in members]
        ms = [gained[each].ms for each in names if each in gained]
        share = if_recorded(flops_share_pct, members, facts)
        flops, saved = percent(share) if share else "-", f"{-sum(ms):+.3f}".replace("-", "−") if ms else "-"
        alone = next((if_recorded(_alone, shapes[each]) or "-" for each in names if each in shapes), "-")
        rows.append((name, str(len(members)), shape, flops, saved, alone, compiled, how))
    return tuple(rows)


def layer_shape(linear: Linear) -> str:
    """Write the sides of a layer's weight: 1024 → 4096."""
    if not recorded(linear, "in_features") or not recorded(linear, "out_features"):
        return "-"
    several = f"{linear.gemms} x " if linear.get("gemms", 1) > 1 else ""
    return f"{several}{linear.in_features} → {linear.out_features}"


def runs_in(linear: Linear) -> str:
    """Name the precision that a layer computes in."""
    use, label = linear.get("use"), if_recorded(layer_label, linear)
    if use == "training":
        idle = "(not engaged)" if linear.get("engaged") is False else ""
        return " ".join(filter(None, ("FP8", linear.get("recipe"), label, idle)))
    dtype = str(linear.get("dtype", "not FP8" if use == "none" else "unknown"))
    return f"{dtype}, weights only ({label or 'unknown'})" if use == "storage" else dtype


def _compiled(linear: Linear) -> str:
    return "-" if not recorded(linear, "compiled") else "no" if linear.compiled is None else "yes"


def _alone(shape: LayerShape) -> str:
    if shape.get("fp8_ms") is None:
        return f"{shape.bf16_ms:.2f}"
    casts = f" + {shape.casts_ms:.2f}" if shape.get("casts_ms") is not None else ""
    return f"{shape.bf16_ms:.2f} | {shape.fp8_ms:.2f}{casts}"
