"""Estimate per layer how much its FP8 matmuls save and its casts cost.

Matmuls and casts are those that were timed alone on this GPU (`Trial.shapes`), else those of
`fp8doctor.cost`. Casts are those of a compiled layer: an uncompiled one loses for another reason. Alone they
cost more than in a step, where they share kernels with their neighbors, so a loss counts only if it stays
one with the fewest casts. Experts are left out, because their rows change from step to step, and so are
layers that no FP8 kernel takes as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fp8doctor.analysis.layers import fits_fp8
from fp8doctor.cost import (
    calls_of,
    gemms,
    linear_cost,
    micro_batches,
    modelled_gpu,
    rows_of,
)
from fp8doctor.cost.cast_cost import is_known, layer_casts_ms, recipe_on
from fp8doctor.cost.eager import UNCERTAINTY
from fp8doctor.facts import Facts, LayerShape, Linear, recorded
from fp8doctor.gpus import GpuSpec
from fp8doctor.recipes import named, recipe_of, stack_of

LEAST_IN_STEP = 0.45
"""Share of the casts that were timed alone that a compiled step pays at the least.

There they are fused with norms and activations, layers with one input cast it once, and the compiler knows
every size. Casts in the step, less what norms, pointwise kernels and copies take less than in compiled BF16,
/ casts alone (one H200, torch 2.11, torchao 0.18): decoders of 454M to 468M 0.61, 0.62, 0.63, 0.68; Llama 1B
with 8,192 tokens 0.46, 0.48, 0.63, with 32 x 256 tokens 0.45; 8B with 4,096 tokens 0.63, with 8,192 1.18; ViT
0.48; one key and value head 0.52, 0.58; a classifier 0.67; Transformer Engine 0.57. Beyond these: its fused
modules 0.31, rowwise 1.56. Alone, one shape varies by 1.4 between processes: 2048 x 512 with 8,192 tokens
took 0.100 and 0.130 ms, 8192 x 2048 took 0.355 and 0.500, and by 2.0 with 16,384: 2048 x 2048 took 0.287 and
0.570. Where the model of the step gives fewer than this share, those count."""


REPEATS_WITHIN = 0.03
"""Share by which two kernels timed in turn may differ by chance; a step and its replica differ by 0.02."""


class Gain(msgspec.Struct, frozen=True):
    """The gain of one layer from FP8, in one micro-batch."""

    bf16_ms: float
    fp8_ms: float
    casts_ms: float
    """Timed alone, or modelled as they are in a step."""
    least_casts_ms: float
    """The least that a step pays of them."""
    margin: float
    """Share by which FP8 has to be slower before it counts as a loss."""
    times: int
    """Repetitions in a step: micro-batches, calls of the layer, and matmuls of that shape."""
    measured: bool
    """True if matmuls and casts were timed; if the casts are missing, only they are modelled."""
    gpu: str

    @property
    def ms(self) -> float:
        """Compute what FP8 saves of a step; negative if it costs."""
        return self.times * (self.bf16_ms - self.fp8_ms - self.casts_ms)

    @property
    def most_ms(self) -> float:
        """Compute the most that it can save, with the fewest casts."""
        return self.times * (self.bf16_ms - self.fp8_ms - self.least_casts_ms)

    @property
    def loses(self) -> bool:
        """Return whether it loses to BF16 by more than its margin, even with fewest casts."""
        return self.fp8_ms + self.least_casts_ms > self.bf16_ms * (1 + self.margin)


def gains(facts: Facts) -> dict[str, Gain]:
    """Compute every judged layer's gain by name; empty if tokens or GPU forbid it."""
    timed = {name: shape for shape in timed_shapes(facts) for name in shape.layers}
    layers = judged(facts)
    if not layers:
        return {}
    gpu = modelled_gpu(facts)
    found = ((linear.name, gain_of(linear, facts, gpu, timed.get(linear.name))) for linear in layers)
    return {name: gain for name, gain in found if gain is not None}


def timed_shapes(facts: Facts) -> tuple[LayerShape, ...]:
    """List the shapes that were timed in FP8 on a GPU."""
    if not recorded(facts, "trial.shapes") or facts.trial.device == "cpu":
        return ()
    return tuple(shape for shape in facts.trial.shapes if shape.fp8_ms is not None)


def judged(facts: Facts) -> list[Linear]:
    """List FP8 layers as wide as FP8 kernels need, which multiply every token once."""
    linears, gpu = facts.network.linears, modelled_gpu(facts)
    if gpu is not None:
        linears = tuple(
            msgspec.structs.replace(linear, recipe=recipe_on(linear, gpu))
            if stack_of(linear).defaults and linear.use == "training"
            else linear
            for linear in linears
        )
    return [
        linear
        for linear in linears
        if linear.use == "training"
        and is_known(linear, gpu)
        and linear.role != "experts"
        and fits_fp8(linear)
        and not linear.get("features", {}).get("emulate")
    ]


def gain_of(
    linear: Linear,
    facts: Facts,
    gpu: GpuSpec | None,
    timed: LayerShape | None = None,
    rows: int | None = None,
) -> Gain | None:
    """Compute one layer's gain: timed, else modelled; None if neither is known."""
    rows = rows or rows_of(linear, facts) or facts.workload.tokens
    times = micro_batches(facts) * gemms(linear) * calls_of(linear, facts)
    casts = None
    if gpu is not None and gpu.fp8_tflops is not None and rows is not None:
        casts = modelled_casts_ms(linear, rows, gpu)
    if timed is not None and timed.fp8_ms is not None and timed.casts_ms is not None:
        least = min(each for each in (LEAST_IN_STEP * timed.casts_ms, casts) if each is not None)
        return Gain(
            timed.bf16_ms,
            timed.fp8_ms,
            timed.casts_ms,
            least,
            REPEATS_WITHIN,
            times,
            True,
            facts.trial.gpu or "the GPU of the trial",
        )
    if gpu is None or rows is None or casts is None:
        return None
    if timed is not None and timed.fp8_ms is not None:
        return Gain(
            timed.bf16_ms, timed.fp8_ms, casts, casts, UNCERTAINTY, times, False, facts.trial.gpu or gpu.name
        )
    cost = linear_cost(linear, rows, gpu)
    return Gain(*cost, casts, casts, UNCERTAINTY, times, False, gpu.name) if cost else None


def modelled_casts_ms(linear: Linear, rows: int, gpu: GpuSpec) -> float:
    """Model the casts of a compiled layer, or of one of Transformer Engine."""
    recipe = recipe_of(linear) if linear.recipe else named("tensorwise")
    cast_rows = round(rows * recipe.frozen_cast_share) if linear.requires_grad is False else rows
    found = layer_casts_ms(recipe, cast_rows, linear.in_features, linear.out_features, gpu, compiled=True)
    assert found is not None, linear.recipe
    return found


def speedup(of: Iterable[Gain]) -> float:
    """Divide matmuls in BF16 by matmuls and the fewest casts in FP8."""
    of = list(of)
    return sum(gain.times * gain.bf16_ms for gain in of) / sum(
        gain.times * (gain.fp8_ms + gain.least_casts_ms) for gain in of
    )
