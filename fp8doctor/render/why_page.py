"""All facts about one layer as a page, or about several as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8doctor.answer.items import HOW_KNOWN
from fp8doctor.answer.job import quantity
from fp8doctor.answer.layer_rows import HEADS, LEGEND, layer_rows, layer_shape, runs_in
from fp8doctor.diagnosis.layer import LayerReport
from fp8doctor.facts import Facts, recorded
from fp8doctor.render.page import Labelled, Page, Quiet, Table
from fp8doctor.render.trace_page import FAMILIES
from fp8doctor.wording import percent, plural


def page(layers: Sequence[LayerReport], asked: str, facts: Facts) -> Page:
    """Lay out one layer, or a row for each kind of several."""
    version = f"fp8doctor {layers[0].tool.version}"
    if len(layers) == 1:
        rows = tuple((label, "; ".join(told)) for label, told in _known(layers[0]) if told)
        return Page((version, layers[0].seen.name), (Labelled(rows),))
    found = layer_rows((each.seen for each in layers), facts)
    heading = (version, f"{plural(len(layers), 'layer')} named {asked}")
    return Page(heading, (Table(HEADS, found, "runs in"), Quiet(LEGEND)))


def _known(layer: LayerReport) -> Iterator[tuple[str, list[str]]]:
    """List what was seen, counted, timed, compared and advised."""
    linear, shape = layer.seen, layer.shape
    seen = [linear.kind, layer_shape(linear), f"runs in {runs_in(linear)}"]
    seen += ["trained" if linear.requires_grad else "frozen"] if recorded(linear, "requires_grad") else []
    seen += [f"it is the {linear.role}"] if linear.get("role", "body") != "body" else []
    seen += [f"LoRA's {linear.adapter}"] if linear.get("adapter") else []
    for what, field in (("compiled", "compiled"), ("checkpointed", "checkpointed")):
        if recorded(linear, field):
            by = getattr(linear, field)
            seen.append(f"not {what}" if by is None else f"{what} with {by or 'the whole model'}")
    if linear.get("engaged") is not None:
        seen.append(f"its last forward {'ran' if linear.engaged else 'did not run'} in FP8")
    seen += [f"{name}={value}" for name, value in linear.get("features", {}).items()]
    yield "Seen", seen
    counted = [f"{layer.rows:,} rows a call"] if layer.rows else []
    counted += [f"{quantity(linear.parameters)} parameters"] if recorded(linear, "parameters") else []
    if recorded(linear, "flops_share_pct") and linear.flops_share_pct is not None:
        counted.append(f"{percent(linear.flops_share_pct)} of the matmul FLOPs of the model")
    yield "Counted", counted
    alone = ["not in this report"]
    if shape:
        alone = [
            f"{shape.m:,} x {shape.k:,} x {shape.n:,} (rows x K x N), {shape.recipe}",
            f"BF16 {shape.bf16_ms:.3f} ms",
        ]
        alone += [f"FP8 {shape.fp8_ms:.3f} ms"] if shape.fp8_ms is not None else []
        alone += [f"casts {shape.casts_ms:.3f} ms, compiled"] if shape.casts_ms is not None else []
        alone += [shape.reason] if shape.reason else []
        alone.append(f"in one micro-batch, one of {plural(len(shape.layers), 'layer')} of this shape")
    yield "Alone", alone
    if layer.gain_ms is not None:
        saves = f"{'saves' if layer.gain_ms > 0 else 'costs'} {abs(layer.gain_ms):.3f} ms/step in this layer"
        yield "FP8", [f"{saves}, {HOW_KNOWN[layer.gain_basis]}, compiled"]
    for variant, module in layer.modules.items():
        longest = sorted(module.families_ms.items(), key=lambda each: -each[1])
        names: dict[str, str] = dict(FAMILIES)
        yield (
            f"Profiled, {variant}",
            [", ".join(f"{names.get(family, family)} {ms:.3f} ms" for family, ms in longest)],
        )
    kept = ["the plan keeps this layer in BF16"] if layer.keep_in_bf16 else []
    yield "Advised", [*layer.advised, *kept] or ["nothing"]
    yield "For all", [*layer.advised_for_all]
