"""The table of matmuls: each shape's gain from FP8, and its part in the step.

A line is one matmul of one shape: the BF16 kernel, the FP8 kernel alone, the casts that only this matmul
needs (`fp8doctor.analysis.layer_gain`), and the net, what FP8 saves of one call. Times the calls of a step
the lines add up to what single layers let expect of the step. Next to it stands what the profiled steps show:
matmuls and casts in BF16, less those in FP8, each on its own; what casts do of a norm's work is not theirs.
What is left over is no single layer's: casts that share a kernel with the norm or the activation before them,
or that layers with one input share, caches, clocks, eager casts.

Held to 23 recorded steps (H200, torch 2.11, none recomputed) matmuls alone save 0.89 of what they save in the
step in the median (0.80 to 1.10), where clocks are lower. Casts alone cost 1.5 times what they cost in the
step in the median: 0.2 times where they are eager, 4.4 times where a fused layer of Transformer Engine casts
in its norms.

Transformer Engine's own yardstick is counted likewise: its ``benchmarks/gemm`` times output, input gradient
and weight gradient of a configuration's shapes, pre-quantized (the FP8 kernel alone here) and with
quantization (with the casts here). `Ledger.speedup` is its quotient with quantization: a 5B on an H200 NVL
(hidden 4096, 15,872 tokens) has 1.69 with delayed scaling, 1.58 with current and 1.40 with block scaling, and
1.90 to 1.92 pre-quantized. Casts here are what torch.compile makes of them, alone, so they are slower than in
a step, and of Transformer Engine's recipes they stand for its kernels, which move the same bytes. Block
scaling is not timed alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.arms import fair_bf16, fp8_totals, uses_fp8
from fp8doctor.analysis.layer_gain import cast_shares, timed_shapes
from fp8doctor.analysis.step_difference import waterfall
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF, KEEP_IN_BF16, LARGER_BATCH, traits
from fp8doctor.cost import calls_of, gemms, micro_batches
from fp8doctor.cost.matmul_counts import is_recomputed
from fp8doctor.facts import Arm, Facts, LayerShape, Layout, Linear, recorded
from fp8doctor.facts.arm_names import is_conversion, recipe_of
from fp8doctor.facts.record import Record

OTHER_WORK = (KEEP_IN_BF16, LARGER_BATCH, CHECKPOINTING_OFF, "adapters-to-bf16")
"""Treatments after which the step has other matmuls than those that were timed alone."""


class LedgerLine(Record, frozen=True, kw_only=True):
    """One matmul of one shape."""

    m: int
    k: int
    n: int
    recipe: str
    layout: Layout
    layers: int
    """Layers of this shape."""
    calls: int
    """Calls in a step, over all layers and micro-batches; with checkpointing twice the output's."""
    bf16_ms: float
    fp8_ms: float | None
    """None if the recipe keeps it in BF16."""
    casts_ms: float
    """Its part of the casts of the layer, which were timed together, by the bytes that they move."""
    net_ms: float
    """FP8's saving of one call; negative if it costs."""
    step_ms: float
    """The same of a step."""


class Ledger(Record, frozen=True, kw_only=True):
    """All lines, their sums over a step, and what the step shows."""

    lines: tuple[LedgerLine, ...]
    """Largest saving first, the matmuls of a shape together."""
    layers: int
    """FP8 layers that the lines are of."""
    bf16_ms: float
    fp8_ms: float
    """Without the casts; with what stays in BF16."""
    casts_ms: float
    net_ms: float
    """The saving of a step that single layers predict."""
    speedup: float
    """BF16 matmuls / FP8 matmuls and casts."""
    fp8_arm: str | None
    """The profiled variant that it is compared with; None if none has this work."""
    bf16_arm: str | None
    step_gemms_saved_ms: float | None = None
    """Matmuls of ``bf16_arm`` less those of ``fp8_arm``; ``bf16_ms`` less ``fp8_ms`` is what is expected of
    it."""
    step_casts_ms: float | None = None
    """Casts of ``fp8_arm`` less those of ``bf16_arm``; ``casts_ms`` is what is expected of it."""
    step_saved_ms: float | None
    """The former less the latter."""
    unexplained_ms: float | None
    """``step_saved_ms`` less ``net_ms``."""


def ledger(facts: Facts) -> Ledger | None:
    """Write the table of a trial on a GPU; None if no shape was timed by matmul."""
    if not recorded(facts, "network.linears"):
        return None
    known = {linear.name: linear for linear in facts.network.linears}
    shapes = [
        each
        for each in timed_shapes(facts)
        if each.casts_ms is not None
        and each.get("gemms")
        and any(name in known for name in each.layers)
    ]
    if not shapes:
        return None
    by_shape = [
        list(
            _lines(shape, cast_shares(shape), [known[name] for name in shape.layers if name in known], facts)
        )
        for shape in shapes
    ]
    by_shape.sort(key=lambda lines: -sum(each.step_ms for each in lines))
    lines = tuple(line for each in by_shape for line in each)
    bf16 = sum(line.calls * line.bf16_ms for line in lines)
    fp8 = sum(line.calls * (line.bf16_ms if line.fp8_ms is None else line.fp8_ms) for line in lines)
    casts = sum(line.calls * line.casts_ms for line in lines)
    net = sum(line.step_ms for line in lines)
    arms = _arms(facts, {shape.recipe for shape in shapes})
    seen = waterfall(*arms) if arms else None
    saved = None if seen is None else -(seen.parts_ms["GEMMs"] + seen.parts_ms["casts"])
    return Ledger(
        lines=lines,
        layers=sum(each[0].layers for each in by_shape),
        bf16_ms=bf16,
        fp8_ms=fp8,
        casts_ms=casts,
        net_ms=net,
        speedup=bf16 / (fp8 + casts),
        fp8_arm=arms[0].name if arms else None,
        bf16_arm=arms[1].name if arms else None,
        step_gemms_saved_ms=None if seen is None else -seen.parts_ms["GEMMs"],
        step_casts_ms=None if seen is None else seen.parts_ms["casts"],
        step_saved_ms=saved,
        unexplained_ms=None if saved is None else saved - net,
    )


def _lines(
    shape: LayerShape, shares: dict[Layout, float], linears: list[Linear], facts: Facts
) -> Iterator[LedgerLine]:
    """Write the lines of one shape, whose matmuls have these shares of its casts."""
    once = [micro_batches(facts) * gemms(linear) * calls_of(linear, facts) for linear in linears]
    again = [count for count, linear in zip(once, linears, strict=True) if is_recomputed(linear)]
    for gemm in shape.gemms:
        casts = (shape.casts_ms or 0.0) * shares[gemm.layout] if gemm.fp8_ms is not None else 0.0
        net = gemm.bf16_ms - gemm.fp8_ms - casts if gemm.fp8_ms is not None else 0.0
        calls = sum(once) + (sum(again) if gemm.layout == "output" else 0)
        yield LedgerLine(
            m=shape.m,
            k=shape.k,
            n=shape.n,
            recipe=shape.recipe,
            layout=gemm.layout,
            layers=len(linears),
            calls=calls,
            bf16_ms=gemm.bf16_ms,
            fp8_ms=gemm.fp8_ms,
            casts_ms=casts,
            net_ms=net,
            step_ms=calls * net,
        )


def _arms(facts: Facts, recipes: set[str]) -> tuple[Arm, Arm] | None:
    """Pick the FP8 step with the timed matmuls, and its BF16; both profiled.

    The prescription comes first: its casts are compiled, like those that were timed alone.
    """
    for fp8 in reversed(fp8_totals(facts)):
        treatments = fp8.get("treatments", ())
        if uses_fp8(facts):
            same = not any(each in OTHER_WORK or traits(each).recipe for each in treatments)
        else:
            same = is_conversion(fp8.name) and recipes == {recipe_of(fp8.name)}
        bf16 = fair_bf16(facts, fp8) if same else None
        if bf16 and recorded(fp8, "breakdown") and recorded(bf16, "breakdown") and waterfall(fp8, bf16):
            return fp8, bf16
    return None
