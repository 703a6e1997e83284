"""All facts about one layer as a page, or about several as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.diagnosis.layer import Advice, LayerReport
from fp8doctor.facts import LayerShape, Linear, ModuleTime, recorded
from fp8doctor.render.header import quantity
from fp8doctor.render.table_page import Sheet, Table
from fp8doctor.render.trace_page import FAMILIES, change
from fp8doctor.render.words import HOW_KNOWN
from fp8doctor.wording import percent, plural

MOST_SHOWN = 40
"""Rows of a table of layers."""


def page(layer: LayerReport) -> Sheet:
    """Lay out one layer."""
    parts: list[Table | str] = [*_seen(layer), *_counted(layer)]
    parts += _timed(layer.shape) if layer.shape else ["Timed alone: not in this report."]
    if layer.gain_ms is not None and layer.gain_basis is not None:
        saves = "saves" if layer.gain_ms > 0 else "costs"
        how = HOW_KNOWN[layer.gain_basis]
        parts.append(f"FP8 {saves} {abs(layer.gain_ms):.3f} ms/step in this layer, {how}, compiled.")
    if layer.modules:
        parts.append(_modules(layer.modules))
    parts += _advised(layer)
    return Sheet((f"fp8doctor {layer.tool.version}", layer.seen.name), (), tuple(parts), "")


def overview(layers: Sequence[LayerReport], asked: str) -> Sheet:
    """Lay out several layers, one a row."""
    rows = tuple(
        (
            layer.seen.name,
            _size(layer.seen),
            _how(layer.seen),
            percent(share) if (share := _share(layer.seen)) is not None else "-",
            change(-layer.gain_ms, 3) if layer.gain_ms is not None else "-",
            "yes" if layer.keep_in_bf16 else "",
        )
        for layer in layers[:MOST_SHOWN]
    )
    heads = ("layer", "K x N", "runs in", "FLOPs", "FP8, ms", "keep in BF16")
    parts: tuple[Table | str, ...] = (Table(heads, rows),)
    if len(layers) > MOST_SHOWN:
        parts += (f"And {plural(len(layers) - MOST_SHOWN, 'layer')} more.",)
    heading = (f"fp8doctor {layers[0].tool.version}", f"{plural(len(layers), 'layer')} named {asked}")
    return Sheet(heading, (), parts, "FP8, ms: what FP8 changes of a step in this layer; - is not known.")


def _share(linear: Linear) -> float | None:
    return linear.flops_share_pct if recorded(linear, "flops_share_pct") else None


def _size(linear: Linear) -> str:
    known = recorded(linear, "in_features") and recorded(linear, "out_features")
    return f"{linear.in_features:,} x {linear.out_features:,}" if known else "-"


def _how(linear: Linear) -> str:
    """Name the precision that a layer computes in."""
    use = linear.get("use", "none")
    recipe = linear.get("recipe")
    if use == "training":
        return f"FP8 {recipe or ''}".rstrip()
    dtype = linear.get("dtype", "?")
    return f"{dtype} (FP8 storage)" if use == "storage" else dtype


def _seen(layer: LayerReport) -> Iterator[str]:
    """List the facts that the examination saw."""
    linear = layer.seen
    stack = f", by {linear.stack}" if recorded(linear, "stack") else ""
    yield f"Seen: {linear.kind}{stack}, {_size(linear)} (K x N), runs in {_how(linear)}."
    told = []
    if recorded(linear, "dtype"):
        told.append(f"weight in {linear.dtype}")
    if recorded(linear, "requires_grad"):
        told.append("trained" if linear.requires_grad else "frozen")
    if linear.get("role", "body") != "body":
        told.append(f"it is the {linear.role}")
    if linear.get("adapter"):
        told.append(f"LoRA's {linear.adapter}")
    if recorded(linear, "compiled"):
        told.append(_covered("compiled", linear.compiled, "not compiled"))
    if recorded(linear, "checkpointed"):
        told.append(_covered("checkpointed", linear.checkpointed, "keeps its activations"))
    if linear.get("engaged") is not None:
        told.append(
            "its last forward ran in FP8" if linear.engaged else "its last forward did not run in FP8"
        )
    if recorded(linear, "features"):
        told += [f"{name}={value}" for name, value in linear.features.items()]
    if told:
        yield f"State: {', '.join(told)}."


def _covered(what: str, by: str | None, otherwise: str) -> str:
    if by is None:
        return otherwise
    return f"{what} with {by}" if by else f"{what} with the whole model"


def _counted(layer: LayerReport) -> Iterator[str]:
    linear = layer.seen
    told = [f"{layer.rows:,} rows a call"] if layer.rows else []
    if recorded(linear, "parameters"):
        told.append(f"{quantity(linear.parameters)} parameters")
    if (share := _share(linear)) is not None:
        told.append(f"{percent(share)} of the matmul FLOPs of the model")
    if told:
        yield f"Counted: {', '.join(told)}."


def _timed(shape: LayerShape) -> list[Table | str]:
    """Write the table of its shape's matmuls, timed alone."""
    of = f"{shape.m:,} x {shape.k:,} x {shape.n:,} (rows x K x N), {shape.recipe}"
    alone = f"Timed alone: {of}: BF16 {shape.bf16_ms:.3f} ms"
    if shape.fp8_ms is not None:
        casts = f" and {shape.casts_ms:.3f} ms of casts, compiled" if shape.casts_ms is not None else ""
        alone += f", FP8 {shape.fp8_ms:.3f} ms{casts}"
    why = f" ({shape.reason})" if shape.reason else ""
    others = plural(len(shape.layers), "layer")
    return [f"{alone}{why}; of one layer in one micro-batch. The shape is that of {others}."]


def _modules(modules: dict[str, ModuleTime]) -> Table:
    rows = tuple(
        (variant_in_a_sentence(arm), f"{sum(module.families_ms.values()):.3f}", _families(module))
        for arm, module in modules.items()
    )
    return Table(("profiled uncompiled, in", "ms/step"), rows, "of which")


def _families(module: ModuleTime) -> str:
    longest = sorted(module.families_ms.items(), key=lambda each: -each[1])
    names: dict[str, str] = dict(FAMILIES)
    return ", ".join(f"{names.get(family, family)} {ms:.3f}" for family, ms in longest)


def _advised(layer: LayerReport) -> Iterator[str]:
    """Write what names the layer, and once what is for the whole model."""
    for_all = {advice.code for advice in layer.advised_for_all}
    for advice in layer.advised:
        if advice.treatment or advice.code not in for_all:
            yield f"Advised: {_in_words(advice)}"
    if layer.keep_in_bf16:
        yield "The prescription keeps this layer in BF16."
    yield from (f"Advised for the whole model: {_in_words(advice)}" for advice in layer.advised_for_all)
    if not (layer.advised or layer.advised_for_all):
        yield "Advised: nothing."


def _in_words(advice: Advice) -> str:
    code = f"{advice.code}: " if advice.code else ""
    fix = f" Fix: {advice.summary}." if advice.summary else ""
    return f"{code}{advice.title}.{fix}"
