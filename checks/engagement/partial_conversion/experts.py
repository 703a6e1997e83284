"""Experts that stay out of FP8, because they are too small for it."""

from fp8doctor import kit

from . import MOST, bound

LITTLE = 1.10  # speedup of all matmuls below which FP8 is not worth its casts: a choice


@kit.check("MOD004", "experts-not-reached", severity="warning", was="MOD012", changes_fp8=True)
def experts_not_reached(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears = facts.network.linears
    experts = [linear for linear in linears if linear.role == "experts" and linear.gemms > 1]
    if not experts or not any(linear.use == "training" for linear in linears):
        return kit.NotApplicable(reason="no 3-D expert weights next to an FP8 layer")
    out = [linear for linear in experts if linear.use == "none"]
    left = [linear for linear in out if kit.layers.too_small(linear, rowwise=True)]
    if left and not kit.layers.shares_are_known(facts):
        raise kit.Unrecorded(kit.Linear, "flops_share_pct")
    unused = [each for each in linears if each.use == "none" or each.compiled is None]
    apart = kit.flops_share_pct([each for each in unused if each.role in kit.layer_gain.APART], facts)
    share = kit.flops_share_pct(left, facts)
    if not left or share < MOST * (100.0 - apart):
        return None
    first, rest = left[0], max(0.0, 100.0 - share - apart)
    most = bound(rest, facts)
    if most is None or most >= LITTLE:
        return None
    return kit.Finding(
        title=f"Experts hold {kit.percent(100.0 * share / (100.0 - apart))} of the matmul FLOPs that FP8 "
        "could take, and stay in 16 bits",
        explanation=f"Each expert is {first.in_features} x {first.out_features}; torchao's own filter "
        "expects FP8 to be slower at this size. Without them, the head and the router, "
        f"{kit.percent(rest)} of all matmul FLOPs are left for FP8: at most {most:.2f}x for the matmuls, "
        "without casts.",
        evidence={
            "weights": len(left),
            "share_pct": round(share, 1),
            "left_for_fp8_pct": round(rest, 1),
            "ceiling": round(most, 2),
            "first": first.name,
        },
        treatment=kit.stay_in_bf16(facts, "the experts are too small for it"),
    )
