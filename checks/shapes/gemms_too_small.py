"""Layers too small to pay for their casts

What it finds. Some FP8 layers cost more time in casts than their FP8 matmuls save, even compiled.

Why it matters. FP8 halves the time of a large matmul, but adds casts. Input, weight and gradient are read
once for their largest value, and once more to be written in FP8, in two layouts. A matmul grows with M x K x
N; its casts grow only with M x K, K x N and M x N. If K or N is small, as in grouped-query attention's key
and value projections, the casts cost more than the matmul saves.

Fix. Leave these layers out of the conversion; the others keep their gain (torchao 0.18).

    convert_to_float8_training(model)  # before: all of them

    from torchao.float8 import convert_to_float8_training
    small = {f"model.layers.{i}.self_attn.k_proj" for i in range(32)}
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in small)  # after

When to ignore it. If you convert everything to study numerics.

How it is detected, and limits. On a GPU the trial times each layer's matmuls in BF16 and FP8, and its
compiled casts; otherwise all of it is estimated. A layer must be 3% slower when timed, counting only 45% of
its casts (the least a step pays), or 25% when estimated. Together they must cost 2% of the matmul time. If
rowwise scaling is the reason, see SHP005; if more tokens help, SHP003. If the trial timed the whole step
without these layers in FP8 and gained less, nothing is reported.

References. torchao's own filter skips K <= 4096 with N <= 1024 (`_auto_filter_for_recipe`, 0.12 to 0.18,
tuned on H100). https://github.com/pytorch/ao/tree/v0.10.0/torchao/float8
https://github.com/pytorch/torchtitan/issues/1207 (key and value projections 40% slower in FP8)
"""

from __future__ import annotations

from collections import Counter

from fp8doctor.analysis.arms import savings
from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.layers import would_be_converted
from fp8doctor.analysis.losing_layers import (
    acquitted,
    at_least,
    basis,
    crossing,
    in_step,
    is_given,
    losing_body,
    saving,
    to_keep,
    would_lose,
)
from fp8doctor.analysis.recipe_support import unaligned
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16
from fp8doctor.cost import micro_batches, modelled_gpu, mxfp8_experts, routed_rows
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Facts, Linear, if_recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import plural

SHAPES_SHOWN = 3
"""Shapes that the title names. A choice of length."""

PAYS = 1.10
"""Speedup of experts below which their casts are reported. A choice."""


@check("SHP002", "gemms-too-small", area="shapes", severity="warning", changes_fp8=True)
def gemms_too_small(facts: Facts) -> Finding | NotApplicable | None:
    if not gains(facts):
        if experts := if_recorded(of_experts, facts):
            return experts
        return NotApplicable(reason="no FP8 layer with known shape, recipe, tokens and GPU datasheet")
    if crossing(facts):
        return NotApplicable(reason="with so few tokens, FP8 pays off for no shape (SHP003)")
    found, saved = losing_body(facts), savings(facts).get(KEEP_IN_BF16)
    if not found or acquitted(found.values(), saved):
        return None
    fp8 = facts.network.fp8
    shapes = Counter(f"{each.in_features} x {each.out_features}" for each in fp8 if each.name in found)
    shown = ", ".join(shape for shape, _ in shapes.most_common(SHAPES_SHOWN)) + (
        ", ..." if len(shapes) > SHAPES_SHOWN else ""
    )
    bf16, in_fp8, casts = (
        sum(gain.times * getattr(gain, part) for gain in found.values())
        for part in ("bf16_ms", "fp8_ms", "least_casts_ms")
    )
    treatment = keep_in_bf16(tuple(found), facts)
    if pays_for_none(fp8, facts):
        treatment = stay_in_bf16(facts, "FP8 pays off for none of these shapes")
    return Finding(
        title=f"{plural(len(found), 'FP8 layer')} of {len(fp8)} (in x out {shown}) "
        f"{'is' if len(found) == 1 else 'are'} slower than BF16, compiled "
        f"too{'' if all(gain.measured for gain in found.values()) else ' (estimated)'}",
        explanation=f"{basis(found.values())}: their matmuls take {bf16:.2f} ms/step in BF16 and "
        f"{in_fp8:.2f} ms in FP8, their casts {at_least(found.values())}{casts:.2f} ms.{in_step(saved)}",
        evidence={
            "losing_layers": len(found),
            "fp8_layers": len(fp8),
            "in_x_out": tuple(f"{shape}: {count}" for shape, count in shapes.most_common()),
            "tokens": facts.workload.tokens,
            "first": next(iter(found)),
            "bf16_gemms_ms": bf16,
            "fp8_gemms_ms": in_fp8,
            "casts_ms": casts,
            "timed_alone": all(gain.measured for gain in found.values()),
        },
        saving_ms=saving(found.values()),
        treatment=treatment,
    )


def of_experts(facts: Facts) -> Finding | None:
    """Report MXFP8 experts whose casts take what their matmuls save, modelled for a user's batch."""
    gpu = modelled_gpu(facts)
    if gpu is None or not is_given(facts):
        return None
    layers = facts.network.fp8
    costs = [(each, cost) for each in layers if (cost := mxfp8_experts(each, facts, gpu))]
    times = micro_batches(facts)
    bf16, in_fp8, casts = (times * sum(cost[part] for _, cost in costs) for part in range(3))
    if not costs or bf16 >= PAYS * (in_fp8 + casts):
        return None
    first = costs[0][0]
    rows = (routed_rows(first, facts) or 0) // first.gemms
    return Finding(
        severity="info",
        title=f"MXFP8 casts of {plural(len(costs), 'expert weight')} cost {casts:,.1f} ms per step; the "
        f"matmuls save {bf16 - in_fp8:,.1f} ms (estimated)",
        explanation=f"Estimated for {gpu.name} from published kernel times: the experts' matmuls and casts "
        f"are {bf16 / (in_fp8 + casts):.2f}x as fast as in BF16. {first.name} has {first.gemms} experts of "
        f"{first.in_features} x {first.out_features}, with {rows:,} rows each. The fewer rows, the larger "
        "the weights' share of the casts.",
        evidence={
            "expert_weights": len(costs),
            "experts": first.gemms,
            "rows_of_each": rows,
            "bf16_gemms_ms": bf16,
            "fp8_gemms_ms": in_fp8,
            "casts_ms": casts,
            "gpu": gpu.name,
        },
    )


def pays_for_none(fp8: list[Linear], facts: Facts) -> bool:
    """Whether BF16 is better for every FP8 layer, and for every layer that could still be converted."""
    others = (linear for linear in facts.network.linears if if_recorded(would_be_converted, linear))
    run = {linear.name for linear in fp8 if not if_recorded(unaligned, linear)}
    return run <= set(to_keep(facts)) and all(would_lose(linear, facts, fp8[0].recipe) for linear in others)


def _decoder(kv_features: int) -> Facts:
    sides = {"layers.0.k_proj": kv_features, "layers.0.up_proj": 2048}
    linears = (
        float8(name, in_features=2048, out_features=width, flops_share_pct=50.0)
        for name, width in sides.items()
    )
    return example(linears=tuple(linears), batch_source="given", tokens=8192)


FIRES = _decoder(kv_features=64)
SILENT = _decoder(kv_features=2048)
