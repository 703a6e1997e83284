"""Only part of the model is in FP8

A layer that is not converted runs at BF16's speed and limits the whole. With half of the FLOPs in FP8 the
matmuls get at most 1.3x as fast, before the casts are paid. The usual reasons are silent. Accelerate's
Transformer Engine path stops at the first sibling whose sides are not divisible by 16. Its torchao path skips
the first and the last Linear. A filter with exact names matches nothing behind `_orig_mod.` of a compiled
module. GPT-2's Conv1D, MultiheadAttention's `in_proj` and 3-D expert weights are not nn.Linear. torchao's
wrapper around experts takes over `torch._grouped_mm`, not Llama 4's `torch.bmm`.

    blocks = torch.compile(blocks)  # before: the filter matches nothing behind _orig_mod.
    convert_to_float8_training(blocks, module_filter_fn=wanted)

    convert_to_float8_training(blocks, module_filter_fn=wanted)
    blocks = torch.compile(blocks)  # after

fp8doctor leaves out heads, routers, adapters, unaligned sides (SHP001) and layers that are too small for FP8;
bounds are Amdahl's law without casts. Ignore it if your own filter leaves these layers out on purpose.
https://github.com/meta-pytorch/torchtune/issues/2833
https://github.com/pytorch/torchtitan/issues/2086
"""

from collections.abc import Iterable
from typing import Any

from fp8doctor import kit

from .left_out import REASONS, REST, Reason, is_stacked

WORTH_MENTIONING_PCT = 5.0
"""Percent of the matmul FLOPs: less shortens the matmuls by under 2.4% (FP8 at 1.89x), a step's noise."""

MOST = 0.5
"""Part of the convertible FLOPs that a user's own filter must convert. Below it FP8 makes the matmuls at most
1.3x as fast, and the casts use that up: 5 to 25% of a compiled step on one H200."""

WEIGHTS = "Linears' weights (nothing says how many experts a token visits)"


@kit.check(
    "MOD004",
    "partial-conversion",
    severity="warning",
    explained_by=("no-fp8-tensor-cores", "quantized-base"),
    **kit.WRONG_FP8_STEP,
)
def partial_conversion(facts: kit.Facts) -> kit.Finding | None:
    fp8, known = facts.network.fp8, kit.layers.shares_are_known(facts)
    left = [
        each
        for each in facts.network.linears
        if kit.layers.would_be_converted(each, roles=("body", "experts"), rewritten=True)
        and pays(each, fp8, facts)
    ]
    if left and not known and not (left := [each for each in left if each.role == "experts"]):
        raise kit.Unrecorded(kit.Linear, "flops_share_pct")
    share = kit.flops_share_pct if known else weights_share_pct
    done, missing = share(fp8, facts), share(left, facts)
    if missing < WORTH_MENTIONING_PCT:
        return None
    why: dict[Reason, list[kit.Linear]] = {}
    for each in left:
        why.setdefault(next(one for one in REASONS if one.holds(each)), []).append(each)
    shares = {one: share(members, facts) for one, members in why.items()}
    main = max(shares, key=lambda each: shares[each])
    filtered = any(each.role != "experts" for each in fp8)  # else no Linear was converted, by any filter
    chosen = filtered and not any(map(is_stacked, left)) and done >= MOST * (done + missing)
    said = [f"{kit.plural(len(why[one]), 'layer')} ({kit.percent(shares[one])}) {one.said}" for one in why]
    now, then = bound(done, facts), bound(done + missing, facts)
    bounds = f" Upper bound for the matmuls: {now:.2f}x now, {then:.2f}x with these layers." if now else ""
    return kit.Finding(
        severity="info" if chosen else None,
        title=f"Only {kit.percent(done)} of the {'matmul FLOPs' if known else WEIGHTS} are in FP8; "
        f"{kit.percent(missing)} more could be",
        explanation=f"{'; '.join(said)}.{bounds if known else ''}",
        evidence={
            "fp8_share_pct": round(done, 1),
            "missing_share_pct": round(missing, 1),
            "missing_layers": len(left),
            "reasons": tuple(each.name for each in why),
            "first": why[main][0].name,
        },
        treatment=kit.Treatment(
            name=main.name, summary=main.summary, code=lines(main, why[main], left, facts)
        ),
    )


def weights_share_pct(linears: Iterable[kit.Linear], facts: kit.Facts) -> float:
    """Sum up the share of these layers in the weights of all Linears."""
    counts = {each.name: each.in_features * each.out_features * each.gemms for each in facts.network.linears}
    return 100.0 * sum(counts[each.name] for each in linears) / sum(counts.values())


def lines(reason: Reason, layers: list[kit.Linear], left: list[kit.Linear], facts: kit.Facts) -> str:
    """Return the lines with what only this model has: the class of its experts, the layers to leave out."""
    linears = facts.network.linears
    if reason is REST and not any(each.stack == "transformer_engine" for each in linears):
        out = [each.name for each in linears if each not in left and kit.layers.may_be_taken(each)]
        return kit.conversion.conversion(facts, beside=out)
    return reason.code.replace("{kind}", layers[0].kind.rpartition(".")[2])


def pays(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether FP8 makes this layer faster: by torchao's filter, the fixes, and the model where it can."""
    by_row = linear.role == "experts" or kit.recipes.recipe_of(fp8[0]).granularity == "row"
    loses = kit.if_recorded(kit.layer_gain.would_lose, linear, facts, fp8[0].recipe)
    if loses or kit.layers.too_small(linear, rowwise=by_row):
        return False
    unmodelled = linear.role == "experts" or linear.features.get("own_forward")
    if unmodelled or not kit.layer_gain.is_given(facts):
        return True
    gain = kit.layer_gain.gain_of(linear, facts, kit.cost.modelled_gpu(facts))
    return gain is None or not gain.loses(-kit.layer_gain.ERROR)


def bound(fp8_pct: float, facts: kit.Facts) -> float | None:
    """Bound the matmuls' speedup by Amdahl's law, from percent in FP8; None without the GPU's peak."""
    gpu = kit.cost.modelled_gpu(facts)
    if gpu is None or not gpu.fp8_tflops:
        return None
    return kit.cost.amdahl(min(fp8_pct, 100.0) / 100.0, kit.cost.large_gemm_speedup(gpu))


def _blocks(share_pct: float = 50.0, **second: Any) -> kit.Facts:
    left = kit.float8("blocks.1.up", flops_share_pct=share_pct, **second)
    linears = (kit.float8(flops_share_pct=100.0 - share_pct), left)
    known = {"batch_source": None, "tokens": None, "forward_chain": (), "accelerate": None}
    return kit.example(linears=linears, compile_marks=(), **known)


FIRES = (
    _blocks(kind="torch.nn.modules.linear.Linear", stack="torch", use="none", recipe=None, in_features=4096),
    _blocks(95.0, role="experts", gemms=16, features={"grouped_gemm": False}, use="none"),
)
SILENT = _blocks()
