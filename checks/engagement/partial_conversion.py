"""Only part of the model is in FP8

A layer that is not converted runs at BF16's speed and limits the whole. With half of the FLOPs in FP8 the
matmuls get at most 1.3x as fast, before the casts are paid. The usual reasons are silent. Accelerate's
Transformer Engine path stops at the first sibling whose sides are not divisible by 16. Its torchao path skips
the first and the last Linear. A filter with exact names matches nothing behind `_orig_mod.` of a compiled
module. GPT-2's Conv1D, nn.MultiheadAttention's `in_proj` and 3-D expert weights are not nn.Linear. The
wrapper of torchao around experts takes over `torch._grouped_mm`: Llama 4's `torch.bmm` and transformers'
"eager" and "batched_mm" pass it by.

    blocks = torch.compile(blocks)  # before: the filter matches nothing behind _orig_mod.
    convert_to_float8_training(blocks, module_filter_fn=wanted)
    model.set_experts_implementation("eager")

    convert_to_float8_training(blocks, module_filter_fn=wanted)
    blocks = torch.compile(blocks)  # after
    model.set_experts_implementation("grouped_mm")

The finding names your reason and its fix. fp8doctor leaves out heads, routers, adapters, unaligned sides
(SHP001) and layers that are too small for FP8; bounds are Amdahl's law without casts. Ignore it if your own
filter leaves these layers out on purpose, or the experts have a small share of the FLOPs.
https://github.com/meta-pytorch/torchtune/issues/2833
https://github.com/pytorch/torchtitan/issues/2086
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fp8doctor import kit

WORTH_MENTIONING_PCT = 5.0
"""Percent of the matmul FLOPs: less shortens the matmuls by under 2.4% (FP8 at 1.89x), a step's noise."""

ERROR = 0.09
"""Part of BF16 matmul time by which the cost model is off: the mean over 1490 matmuls on an H200."""

MOST = 0.5
"""Part of the convertible FLOPs that a user's own filter must convert, and from which experts limit FP8.
Below it FP8 makes the matmuls at most 1.3x as fast, and the casts use that up: 5 to 25% of a compiled step on
one H200."""

LITTLE = 1.10
"""Speedup of all matmuls below which FP8 is not worth its casts. A choice."""

TE_WRAPPER = "accelerate.utils.transformer_engine.contextual_fp8_autocast"
"""The wrapper that Accelerate puts around a forward after its Transformer Engine conversion (1.2 to 1.15)."""


class Reason(NamedTuple):
    """Why a conversion left a layer out, the first that holds; and the fix."""

    holds: Callable[[kit.Linear, list[kit.Linear], kit.Facts], bool]
    """Called with the layer and the FP8 layers."""
    said: str
    """Completes "14 layers ..."."""
    name: str
    summary: str
    code: str


def is_conv1d(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    return linear.kind.endswith(".Conv1D")


def is_stacked(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether these are 3-D weights of experts."""
    return linear.role == "experts" and linear.gemms > 1


def is_behind_a_stop(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether an unaligned sibling stopped Accelerate's conversion to Transformer Engine."""
    if not any(link.startswith(TE_WRAPPER) for link in facts.training.forward_chain):
        return False
    linears = facts.network.linears
    before = linears[: next(number for number, each in enumerate(linears) if each is linear)]
    stops = [
        each for each in before if each.use == "none" and each.role != "experts" and not kit.fits_fp8(each)
    ]
    return any(linear.name.startswith("".join(each.name.rpartition(".")[:2])) for each in stops)


def is_wrapped(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether a ``torch.compile`` wrapper stands in this layer's true name, and in that of no FP8 layer."""
    marks = [mark.name for mark in facts.training.compile_marks if mark.form == "wrapped"]

    def below(each: kit.Linear) -> bool:
        return any(kit.is_below(each, name) for name in marks)

    return below(linear) and not any(map(below, fp8))


def is_an_end(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether this is the first or the last Linear of a model that Accelerate converted with torchao."""
    ends = [
        each
        for each in facts.network.linears
        if not (each.features.get("functional") or each.role == "experts" or is_conv1d(each, fp8, facts))
    ]
    by_torchao = kit.may_have_converted(facts) and any(each.stack == "torchao" for each in fp8)
    return by_torchao and linear in (ends[0], ends[-1])


REASONS = (
    Reason(
        is_conv1d,
        "are Conv1D, which no converter accepts as a Linear",
        kit.CONV1D.name,
        kit.CONV1D.summary,
        kit.CONV1D.code,
    ),
    Reason(
        lambda linear, *_: is_stacked(linear, *_) and linear.features.get("grouped_gemm") is False,
        "are 3-D expert weights in a layout that torchao's grouped matmul does not accept",
        "experts-by-grouped-gemm",
        "store the experts as [experts, out, in] and use torch's grouped matmul: torchao converts such "
        "experts",
        "self.weight = nn.Parameter(weight.transpose(-2, -1).contiguous())   # if it is [experts, in, out]\n"
        "y = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)   # not a loop, not bmm",
    ),
    Reason(
        is_stacked,
        "are 3-D expert weights, which a converter of nn.Linear does not see",
        "convert-experts",
        "convert the expert weights too, with torchao's grouped matmul (a prototype), before you create the "
        "optimizer",
        "quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, name: "
        'type(module).__name__ == "{kind}")',
    ),
    Reason(
        lambda linear, *_: bool(linear.features.get("functional")),
        "are projections that nn.MultiheadAttention keeps as parameters",
        "own-projections",
        "write the projections as nn.Linear and call scaled_dot_product_attention",
        "q, k, v = self.in_proj(x).chunk(3, -1)   # in_proj = nn.Linear(width, 3 * width)\n"
        "x = functional.scaled_dot_product_attention(q, k, v)",
    ),
    Reason(
        lambda linear, *_: linear.kind in kit.NO_LINEAR,
        "are of a class that is not nn.Linear",
        "convert-before-lora",
        "convert the plain Linears first, then add LoRA around them",
        "# torchtune's LoRALinear is not nn.Linear: build the model without it, then\n"
        "convert_to_float8_training(model)\nmodel = get_peft_model(model, LoraConfig(...))   # peft",
    ),
    Reason(
        lambda linear, *_: bool(linear.features.get("computed_weight")),
        "compute their weight in each forward (weight_norm, spectral_norm), so torchao's conversion raises",
        "convert-before-parametrizing",
        "convert first, then parametrize the converted layer's weight",
        "# a sketch: the plain Linear, then its conversion, then its parametrization\n"
        "convert_to_float8_training(model)\nlayer = weight_norm(model.layer)",
    ),
    Reason(
        is_behind_a_stop,
        "come after a sibling with unaligned sides, at which Accelerate's conversion stops",
        "convert-with-torchao",
        "make the unaligned sides multiples of 16, or convert with torchao, which skips only the layer "
        "itself",
        "{exported}   # or choose widths divisible by 16 in the model's configuration",
    ),
    Reason(
        is_wrapped,
        "are inside a compiled wrapper, so their names begin with _orig_mod. and an exact-name filter "
        "misses them",
        "convert-before-compile",
        "convert before torch.compile, or remove _orig_mod. from the names in the filter",
        "convert_to_float8_training(model, module_filter_fn=lambda module, name: "
        'name.replace("_orig_mod.", "") in NAMES)',
    ),
    Reason(
        is_an_end,
        "are the first or the last Linear, which Accelerate's torchao path skips",
        "own-filter",
        "convert with your own filter that leaves out only the head",
        'Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig('
        'pad_inner_dim=True), module_filter_func=lambda module, name: name != "lm_head")])',
    ),
    Reason(
        lambda *_: True,
        "were left out by the conversion's filter",
        "convert-the-rest",
        "widen the filter: every Linear with sides divisible by 16, except the head",
        "wanted = lambda module, name: not (module.in_features % 16 or module.out_features % 16 or "
        "name.endswith('lm_head'))\nconvert_to_float8_training(model, module_filter_fn=wanted)",
    ),
)
BY_FILTER = REASONS[-1]

TOO_SMALL = "the experts are too small for FP8, and the rest is little"

WEIGHTS = "Linears' weights (nothing says how many experts a token visits)"

OLD_EXPERTS = (
    "# MoETrainingConfig: torchao.prototype.moe_training.conversion_utils, torchao 0.12 to 0.16\n"
    'quantize_(model, MoETrainingConfig(), filter_fn=lambda module, name: type(module).__name__ == "{kind}")'
)
"""The lines for experts before torchao 0.17."""


@kit.check(
    "MOD004",
    "partial-conversion",
    area="engagement",
    severity="warning",
    explained_by=("no-fp8-tensor-cores", "quantized-base"),
    changes_fp8=True,
    invalidates_model=True,
)
def partial_conversion(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears, fp8 = facts.network.linears, facts.network.fp8
    if not fp8:
        return kit.NotApplicable(reason="no FP8 layer in the model")
    left = [
        each
        for each in linears
        if kit.would_be_converted(each, roles=("body", "experts"), rewritten=True) and pays(each, fp8, facts)
    ]
    known = kit.shares_are_known(facts)
    if left and not known and not (left := [each for each in left if each.role == "experts"]):
        raise kit.Unrecorded(kit.Linear, "flops_share_pct")
    share, unit = (kit.flops_share_pct, "matmul FLOPs") if known else (weights_share_pct, WEIGHTS)
    done, missing = share(fp8, facts), share(left, facts)
    if missing < WORTH_MENTIONING_PCT:
        return None
    why: dict[Reason, list[kit.Linear]] = {}
    for each in left:
        why.setdefault(next(one for one in REASONS if one.holds(each, fp8, facts)), []).append(each)
    shares = {one: share(members, facts) for one, members in why.items()}
    main = max(shares, key=lambda each: shares[each])
    chosen = missing - shares.get(BY_FILTER, 0.0) < WORTH_MENTIONING_PCT and done >= MOST * (done + missing)
    said = (f"{kit.plural(len(why[one]), 'layer')} ({kit.percent(shares[one])}) {one.said}" for one in why)
    most = bound(done, facts), bound(done + missing, facts)
    bounds = f" Upper bound for the matmuls: {most[0]:.2f}x now, {most[1]:.2f}x with these layers."
    return kit.Finding(
        severity="info" if chosen else None,
        title=f"Only {kit.percent(done)} of the {unit} are in FP8; {kit.percent(missing)} more could be",
        explanation=f"{'; '.join(said)}.{bounds if known and most[0] else ''}",
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
    if reason.name == "convert-experts":
        code = reason.code if kit.has_op_configs(facts) else OLD_EXPERTS
        return code.format(kind=layers[0].kind.rpartition(".")[2])
    if reason.holds is is_behind_a_stop:
        return reason.code.format(exported=kit.exported(facts, ACCELERATE_FP8_BACKEND="AO"))
    by_names = reason is BY_FILTER or reason.holds in (is_wrapped, is_an_end)
    if not by_names or any(linear.stack == "transformer_engine" for linear in facts.network.linears):
        return reason.code
    out = [linear.name for linear in facts.network.linears if linear not in left and kit.may_be_taken(linear)]
    return kit.if_recorded(kit.convert_all_but, out, facts) or reason.code


def pays(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether FP8 makes this layer faster: by torchao's filter, the fixes, and the cost model."""
    if kit.too_small(linear, rowwise=linear.role == "experts" or kit.recipe_of(fp8[0]).granularity == "row"):
        return False
    if kit.if_recorded(kit.would_lose, linear, facts, fp8[0].recipe):
        return False
    rows, gpu = kit.rows_of(linear, facts) if kit.is_given(facts) else None, kit.modelled_gpu(facts)
    if not rows or linear.role == "experts" or gpu is None or not gpu.fp8_tflops:
        return True
    cost = kit.linear_cost(linear, rows, gpu)
    casts = kit.casts_ms(rows, linear.in_features, linear.out_features, gpu, compiled=True)
    return cost is not None and cost.saved_ms - casts > ERROR * cost.bf16_ms


def bound(fp8_pct: float, facts: kit.Facts) -> float | None:
    """Bound the matmuls' speedup by Amdahl's law, from percent in FP8; None without the GPU's peak."""
    gpu = kit.modelled_gpu(facts)
    known = gpu is not None and gpu.fp8_tflops
    return kit.amdahl(min(fp8_pct, 100.0) / 100.0, kit.large_gemm_speedup(gpu)) if gpu and known else None


@kit.check(
    "MOD004", "experts-not-reached", area="engagement", severity="warning", was="MOD012", changes_fp8=True
)
def experts_not_reached(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears = facts.network.linears
    experts = [linear for linear in linears if linear.role == "experts" and linear.gemms > 1]
    if passed_over := [linear for linear in experts if linear.features.get("multiplied_by")]:
        return not_overridden(passed_over, facts)
    if not experts or not any(linear.use == "training" for linear in linears):
        return kit.NotApplicable(reason="no 3-D expert weights next to an FP8 layer")
    left = [linear for linear in experts if linear.use == "none" and kit.too_small(linear, rowwise=True)]
    if left and not kit.shares_are_known(facts):
        raise kit.Unrecorded(kit.Linear, "flops_share_pct")
    apart = kit.flops_share_pct(
        [
            each
            for each in linears
            if each.role in kit.APART and (each.use == "none" or each.compiled is None)
        ],
        facts,
    )
    share = kit.flops_share_pct(left, facts)
    if not left or share < MOST * (100.0 - apart):
        return None
    first, rest = left[0], max(0.0, 100.0 - share - apart)
    most = bound(rest, facts)
    little = most is not None and most < LITTLE
    return kit.Finding(
        severity=None if little else "info",
        title=f"Experts hold {kit.percent(100.0 * share / (100.0 - apart))} of the matmul FLOPs that FP8 "
        "could take, and stay in 16 bits",
        explanation=f"Each expert is {first.in_features} x {first.out_features}; torchao's own filter "
        f"expects FP8 to be slower at this size. Without them, the head and the router, {kit.percent(rest)} "
        "of all matmul FLOPs are left for "
        f"FP8{f': at most {most:.2f}x for the matmuls, without casts' if most else ''}.",
        evidence={
            "weights": len(left),
            "share_pct": round(share, 1),
            "left_for_fp8_pct": round(rest, 1),
            "ceiling": most and round(most, 2),
            "first": first.name,
        },
        treatment=kit.stay_in_bf16(facts, TOO_SMALL) if little else None,
    )


def not_overridden(layers: list[kit.Linear], facts: kit.Facts) -> kit.Finding:
    """Report wrapped experts whose product the wrapper does not take over."""
    first, share = layers[0], kit.flops_share_pct(layers, facts)
    operators = sorted({str(linear.features["multiplied_by"]) for linear in layers})
    kind = first.kind.rpartition(".")[2]
    of_share = f" ({kit.percent(share)} of the matmul FLOPs)" if share else ""
    setting = bool(first.features.get("grouped_gemm"))
    call = kit.in_python("set_experts_implementation", facts.network)
    return kit.Finding(
        title=f"{kit.plural(len(layers), 'expert weight')}{of_share} wrapped for FP8 but computed in 16 bits",
        explanation=f"{kind} multiplies with "
        f"{' and '.join(operators)}{', one expert after the other' if operators == ['linear'] else ''}. "
        "torchao's wrapper takes over the grouped matmul, not this.",
        evidence={"weights": len(layers), "share_pct": round(share, 1), "operators": tuple(operators)},
        treatment=kit.Treatment(
            name="experts-by-grouped-gemm",
            summary="let the experts use torch's grouped matmul"
            + ("" if setting else "; otherwise convert only the other layers"),
            code=f'{call}("grouped_mm")'
            if setting
            else f"# in the forward of {kind}\n"
            "y = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)",
        ),
    )


def _blocks(**second: Any) -> kit.Facts:
    linears = (kit.float8(flops_share_pct=50.0), kit.float8("blocks.1.up", flops_share_pct=50.0, **second))
    marks = (kit.CompileMark(name="blocks.1", form="wrapped", backend="inductor"),)
    workload = {"batch_source": None, "tokens": None}
    return kit.example(linears=linears, **workload, compile_marks=marks, forward_chain=(), accelerate=None)


FIRES = (
    _blocks(kind="torch.nn.modules.linear.Linear", stack="torch", use="none", recipe=None, in_features=4096),
    _blocks(role="experts", gemms=16, features={"grouped_gemm": False, "multiplied_by": "bmm"}),
)
SILENT = _blocks()
