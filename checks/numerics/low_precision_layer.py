"""A layer loses much more in FP8 than the others

What it finds. A layer's FP8 output or gradients are much further from BF16's than those of the other layers.

Why it matters. FP8 rounds each value to three bits of mantissa. This puts a sound layer's noise about 28 dB
below its output, for any size of values. Two things break that. One outlier, about 100,000 times as large as
the rest, sets the scale of the whole tensor, and the rest becomes zero. And if a layer subtracts large terms
from each other, the rounding of the terms is what remains.

Fix. Leave such layers in BF16. If one scale for a whole tensor is the cause, one scale per row (recipe
`rowwise`) may be enough (torchao 0.18).

    convert_to_float8_training(model)  # before

    from torchao.float8 import convert_to_float8_training
    lossy = {"blocks.3.down"}
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in lossy)  # after

When to ignore it. If your loss curve matches BF16's.

How it is detected, and limits. fp8doctor feeds every FP8 layer alone with its input and output gradient from
one BF16 step. It compares output, input gradient and weight gradient (SQNR in dB; for the output also the
typical row). It is one batch, and an error that builds up across layers is not seen.

References. Float8Linears of 512x512 (torchao 0.18, tensorwise), dB of output, input gradient and weight
gradient: normal values 28.5, 24.6, 24.6; one element 1e5 times as large leaves a typical row at 17.8 (rowwise
28.5), 1e6 times at 0.4; inputs whose mean is ten times their spread, canceled by the weights: 8.0. A trained
Llama: 29 to 41, 24 to 32, 26 to 31. torchao's tests require 18 dB for an output and 17 for a weight gradient:
https://github.com/pytorch/ao/blob/v0.18.0/test/float8/test_base.py https://arxiv.org/abs/2209.05433
https://arxiv.org/abs/2402.17762
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Facts, LayerNumerics
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

LEAST_DB = {"output": 18.0, "input gradient": 17.0, "weight gradient": 17.0}
"""Ratios that torchao's tests require (``test_base.py``, see above); an input gradient uses the same cast."""

FAR_BELOW_DB = 6.0
"""Distance from the median of all layers: twice the error. A coarse recipe is not one layer's problem."""

WORTHLESS_DB = 10.0
"""Ratio at which the error has a tenth of the signal's power: low for any layer. A convention."""

MUCH_PCT = 1.0
"""Percent of elements, clipped or turned to zero, that is worth saying. Sound layers stay below 0.4."""

NAMED = 3
"""Layers that the title names; the evidence has them all."""


class Low(NamedTuple):
    """One layer, and the worst of what it computes."""

    layer: LayerNumerics
    what: str
    sqnr_db: float
    median_db: float


@check("NUM002", "low-precision-layer", area="numerics", severity="warning", explained_by=("NUM003",))
def low_precision_layer(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    layers = facts.trial.numerics
    if not layers:
        return NotApplicable(reason="the trial measured no FP8 layer alone")
    low = sorted(lowest(layers), key=lambda each: each.sqnr_db)
    if not low:
        return None
    worst, names = low[0], tuple(each.layer.name for each in low)
    more = f" and {len(low) - NAMED} more" if len(low) > NAMED else ""
    return Finding(
        title=f"{len(low)} of {plural(len(layers), 'FP8 layer')} {loss(low)}: "
        f"{', '.join(names[:NAMED])}{more}",
        explanation=(
            f"The {worst.what} of {worst.layer.name} is {worst.sqnr_db:.1f} dB above its error; the median "
            f"layer's is {worst.median_db:.1f} dB. {why(low)}fp8doctor fed every layer alone with its BF16 "
            "input."
        ),
        evidence={
            "layers": names,
            "sqnr_db": tuple(each.sqnr_db for each in low),
            "of": tuple(each.what for each in low),
            "median_sqnr_db": tuple(each.median_db for each in low),
            "saturated_pct": tuple(each.layer.saturated_pct for each in low),
            "flushed_pct": tuple(each.layer.flushed_pct for each in low),
            "layers_measured": len(layers),
        },
        treatment=treatment(facts, names),
    )


def lowest(layers: Sequence[LayerNumerics]) -> Iterator[Low]:
    """List layers with a result that is low by itself and compared with the others; each with its worst."""
    results = {layer.name: sqnr(layer) for layer in layers}
    medians = {what: median([each[what] for each in results.values() if what in each]) for what in LEAST_DB}
    for layer in layers:
        low = [
            Low(layer, what, db, medians[what])
            for what, db in results[layer.name].items()
            if db < LEAST_DB[what] and (db < medians[what] - FAR_BELOW_DB or db < WORTHLESS_DB)
        ]
        if low:
            yield min(low, key=lambda each: each.sqnr_db)


def sqnr(layer: LayerNumerics) -> dict[str, float]:
    """List a layer's ratios; for the output, the worse of the whole and of a typical row."""
    outputs = [each for each in (layer.output_sqnr_db, layer.typical_output_sqnr_db) if each is not None]
    found = {
        "output": min(outputs, default=None),
        "input gradient": layer.input_gradient_sqnr_db,
        "weight gradient": layer.weight_gradient_sqnr_db,
    }
    return {what: db for what, db in found.items() if db is not None}


def median(values: Sequence[float]) -> float:
    """Take the upper one of an even number; 0 of none."""
    return sorted(values)[len(values) // 2] if values else 0.0


def loss(low: Sequence[Low]) -> str:
    """Say what these layers lose, and whether all are far below the others."""
    apart = all(each.sqnr_db < each.median_db - FAR_BELOW_DB for each in low)
    return (
        f"{'loses' if len(low) == 1 else 'lose'} "
        f"{'far more precision than the others' if apart else 'too much precision'}"
    )


def why(low: Sequence[Low]) -> str:
    """Say what the casts did to the worst layer, if it is known and much."""
    layer = low[0].layer
    said = [
        f"{share:.0f}% of its elements {what}"
        for share, what in ((layer.saturated_pct, "were clipped"), (layer.flushed_pct, "became zero"))
        if share is not None and share >= MUCH_PCT
    ]
    return f"In one cast {' and '.join(said)}. " if said else ""


def treatment(facts: Facts, names: tuple[str, ...]) -> Treatment:
    """Propose these layers in BF16; for torchao also the other recipe."""
    kept = keep_in_bf16(names, facts)
    tensorwise = any(each.name in names and each.recipe == "tensorwise" for each in facts.network.linears)
    note = (
        '\n# or one scale per row, which casts more: Float8LinearConfig.from_recipe_name("rowwise")'
        if tensorwise
        else ""
    )
    return Treatment(name=kept.name, summary=kept.summary, code=kept.code + note, layers=kept.layers)


def _layer(name: str, typical_db: float = 28.5, flushed_pct: float = 0.0) -> LayerNumerics:
    return LayerNumerics(
        name=name,
        output_sqnr_db=28.5,
        typical_output_sqnr_db=typical_db,
        input_gradient_sqnr_db=24.6,
        weight_gradient_sqnr_db=24.6,
        saturated_pct=0.0,
        flushed_pct=flushed_pct,
        non_finite=0,
    )


def _layers(typical_db: float, flushed_pct: float) -> Facts:
    """Four layers of 512x512 as measured, one of them with a huge element in its input."""
    numerics = (*(_layer(f"up.{i}") for i in range(3)), _layer("down", typical_db, flushed_pct))
    linears = tuple(float8(each.name) for each in numerics)
    return example(linears=linears, device="cuda", arms=(), numerics=numerics)


FIRES = _layers(typical_db=0.4, flushed_pct=97.1)
SILENT = _layers(typical_db=28.4, flushed_pct=1.8)
