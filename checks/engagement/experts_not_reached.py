"""FP8 does not reach the experts

What it finds. The experts of a mixture of experts run in 16 bits. Yet torchao's FP8 wrapper is around them,
or the rest of the model is in FP8.

Why it matters. Most of such a model's work is in its experts. To convert them, torchao puts a wrapper around
the weight, which takes over `torch._grouped_mm`, linear, mm and matmul, and no other operator. Llama 4's
experts call `torch.bmm`. JetMoe indexes one expert after the other, as transformers does with
`experts_implementation="eager"` or `"batched_mm"`. The wrapper is then bypassed without a warning. If each
expert is small, torchao's own filter skips all of them, and FP8 can give little.

Fix. Let the module use the grouped matmul. If its class has none, convert only the other layers (torchao
0.18, transformers 5.23).

    model.set_experts_implementation("eager")       # before: one expert after the other

    model.set_experts_implementation("grouped_mm")  # after: the wrapper sees the product

When to ignore it. If the experts have a small share of the matmul FLOPs. Experts that are too small for FP8
are only information if the other layers alone can make the matmuls 1.1 times as fast.

How it is detected, and limits. fp8doctor reads whether the wrapper is there and which operator the module
calls. For small experts it compares their share with all FLOPs except the head's and the router's. It
estimates an upper bound, which ignores the casts.

References. Run on a CPU with torchao 0.18 and transformers 5.23: Mixtral makes 2 FP8 calls per layer with
grouped_mm, none with eager and batched_mm; Llama 4 and JetMoe make none.
https://github.com/pytorch/ao/blob/v0.18.0/torchao/prototype/moe_training/tensor.py Small experts lose:
https://github.com/pytorch/torchtitan/issues/2086
"""

from __future__ import annotations

from fp8doctor.analysis.layers import flops_share_pct, in_python, shares_are_known, too_small
from fp8doctor.analysis.losing_layers import APART
from fp8doctor.cost import amdahl, large_gemm_speedup, modelled_gpu
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import Facts, Linear, Network, Unrecorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

MOST_PCT = 50.0
"""Percent of the matmul FLOPs without heads and routers from which experts in 16 bits limit FP8."""

LITTLE = 1.10
"""Speedup of all matmuls below which FP8 is not worth its casts. A choice."""


@check("MOD012", "experts-not-reached", area="engagement", severity="warning", changes_fp8=True)
def experts_not_reached(facts: Facts) -> Finding | NotApplicable | None:
    linears = facts.network.linears
    experts = [linear for linear in linears if linear.role == "experts" and linear.gemms > 1]
    if not experts:
        return NotApplicable(reason="no 3-D expert weights in the model")
    passed_over = [linear for linear in experts if linear.features.get("multiplied_by")]
    if passed_over:
        return not_overridden(passed_over, facts)
    if not any(linear.use == "training" for linear in linears):
        return NotApplicable(reason="no FP8 layer in the model")
    left = [linear for linear in experts if linear.use == "none" and too_small(linear, rowwise=True)]
    if left and not shares_are_known(facts):
        raise Unrecorded(Linear, "flops_share_pct")
    if flops_share_pct(left, facts) < MOST_PCT / 100.0 * (100.0 - _apart_pct(facts)):
        return None
    return too_small_to_convert(left, facts)


def not_overridden(layers: list[Linear], facts: Facts) -> Finding:
    """Report wrapped experts whose product the wrapper does not take over."""
    first, share = layers[0], flops_share_pct(layers, facts)
    operators = sorted({str(linear.features["multiplied_by"]) for linear in layers})
    of_share = f" ({percent(share)} of the matmul FLOPs)" if share else ""
    return Finding(
        title=f"{plural(len(layers), 'expert weight')}{of_share} wrapped for FP8 but computed in 16 bits",
        explanation=f"{first.kind.rpartition('.')[2]} multiplies with "
        f"{' and '.join(operators)}{', one expert after the other' if operators == ['linear'] else ''}. "
        "torchao's wrapper takes over the grouped matmul, not this.",
        evidence={
            "weights": len(layers),
            "share_pct": round(share, 1),
            "operators": tuple(operators),
            "class": first.kind,
            "first": first.name,
        },
        treatment=by_grouped_gemm(first, facts.network),
    )


def by_grouped_gemm(linear: Linear, network: Network) -> Treatment:
    """Let the experts use the grouped matmul, by a setting if their class has one."""
    name, summary = "experts-by-grouped-gemm", "let the experts use torch's grouped matmul"
    if linear.features.get("grouped_gemm"):
        call = in_python("set_experts_implementation", network)
        return Treatment(name=name, summary=summary, code=f'{call}("grouped_mm")')
    return Treatment(
        name=name,
        summary=f"{summary}; otherwise convert only the other layers",
        code="y = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)   # in the forward of "
        f"{linear.kind.rpartition('.')[2]}",
    )


def _apart_pct(facts: Facts) -> float:
    """Sum up the share of heads and routers in 16 bits; one compiled in FP8 counts with the others."""
    apart = (each for each in facts.network.linears if each.role in APART)
    return flops_share_pct([each for each in apart if each.use == "none" or each.compiled is None], facts)


def too_small_to_convert(layers: list[Linear], facts: Facts) -> Finding:
    """Say what FP8 can give if the experts stay out."""
    share, first, apart = flops_share_pct(layers, facts), layers[0], _apart_pct(facts)
    gpu = modelled_gpu(facts)
    known = gpu is not None and gpu.fp8_tflops
    rest = max(0.0, 100.0 - share - apart)
    most = amdahl(rest / 100.0, large_gemm_speedup(gpu)) if gpu and known else None
    little = most is not None and most < LITTLE
    return Finding(
        severity=None if little else "info",
        title=f"Experts hold {percent(100.0 * share / (100.0 - apart))} of the matmul FLOPs that FP8 could "
        "take, and stay in 16 bits",
        explanation=f"Each expert is {first.in_features} x {first.out_features}; torchao's own filter "
        f"expects FP8 to be slower at this size. Without them, the head and the router, {percent(rest)} of "
        "all matmul FLOPs are left for FP8. "
        + (
            f"Upper bound for the matmuls: {most:.2f}x (estimated for {gpu.name}, without the casts)."
            if gpu and most
            else "fp8doctor has no estimate for this: it knows no FP8 datasheet for this GPU (--assume-gpu)."
        ),
        evidence={
            "weights": len(layers),
            "share_pct": round(share, 1),
            "left_for_fp8_pct": round(rest, 1),
            "in_features": first.in_features,
            "out_features": first.out_features,
            "ceiling": most and round(most, 2),
            "first": first.name,
        },
        treatment=stay_in_bf16(facts, "the experts are too small for FP8, and the rest is little")
        if little
        else None,
    )


def _experts(multiplied_by: str | None) -> Facts:
    experts = float8(
        "layers.0.experts.gate_up_proj",
        kind="transformers.models.llama4.modeling_llama4.Llama4TextExperts",
        use="none" if multiplied_by else "training",
        features={"grouped_gemm": False} | ({"multiplied_by": multiplied_by} if multiplied_by else {}),
        in_features=5120,
        out_features=16384,
        gemms=16,
        role="experts",
        flops_share_pct=60.0,
    )
    return example(linears=(experts,))


FIRES = _experts(multiplied_by="bmm")
SILENT = _experts(multiplied_by=None)
