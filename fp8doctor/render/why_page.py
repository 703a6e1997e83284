"""``why``: all that a report knows of one layer."""

from collections.abc import Iterator

from fp8doctor.answer.layer_rows import LayerReport, layer_shape, runs_in
from fp8doctor.facts import Facts, recorded
from fp8doctor.render.page import Page, labelled


def page(layer: LayerReport, facts: Facts) -> Page:
    rows = labelled((label, "; ".join(told)) for label, told in _known(layer, facts))
    return Page((f"fp8doctor {layer.tool.version}", layer.seen.name), (rows,))


def _known(layer: LayerReport, facts: Facts) -> Iterator[tuple[str, list[str]]]:
    linear = layer.seen
    seen = [linear.kind, layer_shape(linear), f"runs in {runs_in(linear, facts)}"]
    seen += [f"{layer.rows:,} rows a call"] if layer.rows else []
    for what in ("compiled", "checkpointed"):
        if recorded(linear, what):
            by = linear.get(what)
            seen.append(f"not {what}" if by is None else f"{what} with {by or 'the whole model'}")
    yield "Seen", seen + [f"{name}={value}" for name, value in linear.get("features", {}).items()]
    if layer.gain_ms is not None:
        saves = f"{'saves' if layer.gain_ms > 0 else 'costs'} {abs(layer.gain_ms):.3f} ms/step in this layer"
        yield "FP8", [f"{saves}, estimated, compiled"]
    kept = ["the plan keeps this layer in BF16"] if layer.keep_in_bf16 else []
    yield "Advised", [*layer.advised, *kept] or ["nothing"]
