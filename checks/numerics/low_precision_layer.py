"""A layer loses much more in FP8 than the others

Looks at: every FP8 layer alone, fed with the input and the output gradient that it has in one step
of BF16: how far its output, its input gradient and its weight gradient are from those of BF16, as
the ratio of signal to noise (SQNR) in dB. Of the output, the typical row (token) is looked at too.
Shares of clipped elements and of elements that become zero say why.

Why it matters. FP8 rounds each value to three bits of mantissa, which puts the noise of a healthy
layer 28 dB below its output, whatever the size of the values: floating point follows them. Two
things break that. An outlier more than some 100,000 times as large as the rest sets the scale of
the whole tensor, and the rest becomes zero; the outlier's own row still looks well. And where a
layer subtracts large terms from each other, the rounding of the terms is what is left.

What to do. Leave such layers in BF16; where one scale for a whole tensor is the cause, one scale
for each row (recipe `rowwise`) may be enough.

    convert_to_float8_training(model)                                            # before
    keep = {"blocks.3.down"}                                                     # after
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in keep)

Evidence: dB of output, input gradient and weight gradient on Float8Linears of 512x512 (torchao
0.18, tensorwise). Normal values: 28.5, 24.6, 24.6 (rowwise 28.5). Two channels 100 and 300 times as
large: 28.4, 24.6, 24.5. A token 3000 times as large: 28.5, 24.6, 24.6. One element 1e5 times as
large leaves a typical row of the output with 17.8 (rowwise 28.5), 1e6 times with 0.4. Inputs whose
mean is ten times their spread, and weights that cancel it: 8.0. The layers of a Llama trained on
text: 29 to 41, 24 to 32, 26 to 31; of a fresh ViT: 28, 24 to 29, 24 to 28. The tests of torchao
want 18 dB of an output and 17 dB of a weight gradient.
https://github.com/pytorch/ao/blob/v0.18.0/test/float8/test_base.py
https://arxiv.org/abs/2209.05433 https://arxiv.org/abs/2402.17762
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Facts, LayerNumerics, Linear, Network, Trial
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

LEAST_DB = {"output": 18.0, "input gradient": 17.0, "weight gradient": 17.0}
"""Ratio that torchao's tests want of an output and of a weight gradient (``test_base.py``, see above). An
input gradient is made of the same cast, so it has the same."""

FAR_BELOW_DB = 6.0
"""Distance from the median of all layers: twice the error. A recipe that is coarse in every layer is no
layer's disease."""

WORTHLESS_DB = 10.0
"""Ratio at which the error has a tenth of the signal's power: low whatever the other layers have. A
convention of this tool."""

MUCH_PCT = 1.0
"""Share of elements, clipped or turned to zero, that is worth saying. Healthy layers measured above stay
below 0.4."""

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
        return NotApplicable(reason="no FP8 layer was measured alone")
    low = sorted(lowest(layers), key=lambda each: each.sqnr_db)
    if not low:
        return None
    worst, names = low[0], tuple(each.layer.name for each in low)
    more = f" and {len(low) - NAMED} more" if len(low) > NAMED else ""
    return Finding(
        title=f"{len(low)} of {plural(len(layers), 'FP8 layer')} {loss(low)}: "
        f"{', '.join(names[:NAMED])}{more}",
        explanation=(
            f"The {worst.what} of {worst.layer.name} is {worst.sqnr_db:.1f} dB above its error, that of "
            f"the median layer {worst.median_db:.1f}. "
            f"{why(low)}Every layer was fed alone with what BF16 feeds it."
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
    """List layers with a result that is low by itself and among the others', each with the worst of them."""
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
    """List the results of a layer that have a ratio; of the output the worse of the whole and of a typical
    row."""
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
    """Say what these layers do, and how far below the others they are if all of them are."""
    apart = all(each.sqnr_db < each.median_db - FAR_BELOW_DB for each in low)
    return (
        f"{'loses' if len(low) == 1 else 'lose'} "
        f"{'far more than the others' if apart else 'too much precision'}"
    )


def why(low: Sequence[Low]) -> str:
    """Say what the casts did to the worst layer, where that is known and much."""
    layer = low[0].layer
    said = [
        f"{share:.0f} % of its elements {what}"
        for share, what in ((layer.saturated_pct, "were clipped"), (layer.flushed_pct, "became zero"))
        if share is not None and share >= MUCH_PCT
    ]
    return f"In one cast {' and '.join(said)}. " if said else ""


def treatment(facts: Facts, names: tuple[str, ...]) -> Treatment:
    """Propose these layers in BF16; for torchao the other recipe is named too."""
    kept = keep_in_bf16(names, facts)
    tensorwise = any(
        linear.name in names and linear.recipe == "tensorwise" for linear in facts.network.linears
    )
    note = (
        '\n# or one scale for each row: Float8LinearConfig.from_recipe_name("rowwise")' if tensorwise else ""
    )
    return Treatment(name=kept.name, summary=kept.summary, code=kept.code + note, layers=kept.layers)


def _layers(typical_db: float, flushed_pct: float) -> Facts:
    """Four layers of 512x512, one of them with an input that has one element so many times as large, as
    measured."""
    healthy = [
        LayerNumerics(
            name=f"up.{i}",
            output_sqnr_db=28.5,
            typical_output_sqnr_db=28.5,
            input_gradient_sqnr_db=24.6,
            weight_gradient_sqnr_db=24.6,
            saturated_pct=0.0,
            flushed_pct=0.0,
            non_finite=0,
        )
        for i in range(3)
    ]
    odd = LayerNumerics(
        name="down",
        output_sqnr_db=31.3,
        typical_output_sqnr_db=typical_db,
        input_gradient_sqnr_db=24.7,
        weight_gradient_sqnr_db=25.5,
        saturated_pct=0.0,
        flushed_pct=flushed_pct,
        non_finite=0,
    )
    linears = tuple(
        Linear(name=each.name, stack="torchao", use="training", recipe="tensorwise")
        for each in (*healthy, odd)
    )
    return Facts(
        network=Network(linears=linears), trial=Trial(device="cuda", arms=(), numerics=(*healthy, odd))
    )


SICK = _layers(typical_db=0.4, flushed_pct=97.1)
HEALTHY = _layers(typical_db=28.4, flushed_pct=1.8)
