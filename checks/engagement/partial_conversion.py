"""Only part of the model is in FP8

What it finds. Layers that FP8 would make faster stayed in 16 or 32 bits, while others are in FP8.

Why it matters. A layer that is not converted runs at BF16's speed and limits the whole. With half of the
FLOPs in FP8, the matmuls get at most 1.3x as fast, before the casts are paid. The usual reasons are silent.
Accelerate's Transformer Engine path stops at the first sibling whose sides are not divisible by 16. Its
torchao path skips the first and the last Linear. A filter with exact names matches nothing behind
`_orig_mod.` of a compiled module. GPT-2's Conv1D, torchtune's LoRALinear, nn.MultiheadAttention's `in_proj`
and 3-D expert weights are not nn.Linear.

Fix. It depends on the reason; the finding names yours. For `_orig_mod.` names (torchao 0.18):

    blocks = torch.compile(blocks)  # before: the filter matches nothing
    convert_to_float8_training(blocks, module_filter_fn=wanted)

    import torch
    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(blocks, module_filter_fn=wanted)  # after
    blocks = torch.compile(blocks)

When to ignore it. If your own filter leaves these layers out on purpose. If it converts at least half of the
FLOPs, this is only information.

How it is detected, and limits. fp8doctor lists the layers that a conversion would take and their matmul
FLOPs, by the rows each multiplies. It leaves out the head, routers, adapters, unaligned sides (SHP001), and
layers that torchao's filter or the cost model finds too small. The speedup is Amdahl's law without casts.

References. accelerate 1.15 (`convert_model`, `utils/ao.py`) and torchao 0.18 (`swap_linear_layers`,
`_auto_filter_for_recipe`), run on a CPU.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/transformer_engine.py
https://github.com/meta-pytorch/torchtune/issues/2833
"""

from __future__ import annotations

from typing import Any

from fp8doctor.analysis.by_accelerate import exported
from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.analysis.fp8_request import may_have_converted
from fp8doctor.analysis.layers import (
    NO_LINEAR,
    fits_fp8,
    flops_share_pct,
    may_be_taken,
    shares_are_known,
    too_small,
    would_be_converted,
)
from fp8doctor.analysis.losing_layers import is_given, would_lose
from fp8doctor.analysis.recipe_support import has_op_configs
from fp8doctor.cost import GpuSpec, amdahl, casts_ms, large_gemm_speedup, linear_cost, modelled_gpu, rows_of
from fp8doctor.diagnosis.treatments import convert_all_but
from fp8doctor.facts import CompileMark, Facts, Linear, Training, Unrecorded, if_recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import recipe_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

WORTH_MENTIONING_PCT = 5.0
"""Percent of the matmul FLOPs: less shortens the matmuls by under 2.4% (FP8 at 1.89x), a step's noise."""

ERROR = 0.09
"""Part of BF16 matmul time by which the cost model is off: the mean over 1490 matmuls on an H200."""

MOST = 0.5
"""Part of the convertible FLOPs that a user's own filter must convert. Below it FP8 makes the matmuls at most
1.3x as fast (Amdahl, FP8 at 1.89x), and the casts use that up: 5 to 25% of a compiled step on one H200."""

TE_AUTOCAST = "accelerate.utils.transformer_engine.contextual_fp8_autocast"
"""The wrapper that Accelerate puts around a forward after its Transformer Engine conversion (1.2 to 1.15)."""

REASONS = {
    "sibling": (
        "come after a sibling with unaligned sides, at which Accelerate's conversion stops",
        "convert-with-torchao",
        "make the unaligned sides multiples of 16, or convert with torchao, which skips only the layer "
        "itself",
        "",
    ),
    "wrapped": (
        "are inside a compiled wrapper, so their names begin with _orig_mod. and an exact-name filter "
        "misses them",
        "convert-before-compile",
        "convert before torch.compile, or remove _orig_mod. from the names in the filter",
        "convert_to_float8_training(model, module_filter_fn=lambda module, name: "
        'name.replace("_orig_mod.", "") in NAMES)',
    ),
    "conv1d": (
        "are Conv1D, which no converter accepts as a Linear",
        "conv1d-to-linear",
        "replace each Conv1D by an nn.Linear with the transposed weight, before the conversion",
        "linear = nn.Linear(*conv1d.weight.shape)\nlinear.weight.data, linear.bias.data = "
        "conv1d.weight.data.T.contiguous(), conv1d.bias.data",
    ),
    "experts": (
        "are 3-D expert weights, which a converter of nn.Linear does not see",
        "convert-experts",
        "convert the expert weights too, with torchao's grouped matmul (a prototype), before you create the "
        "optimizer",
        "quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, name: "
        'type(module).__name__ == "{kind}")',
    ),
    "experts_as_they_lie": (
        "are 3-D expert weights in a layout that torchao's grouped matmul does not accept",
        "experts-by-grouped-gemm",
        "store the experts as [experts, out, in] and use torch's grouped matmul: torchao converts such "
        "experts",
        "self.weight = nn.Parameter(weight.transpose(-2, -1).contiguous())   # if it is [experts, in, out]\n"
        "y = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)   # not a loop, not bmm",
    ),
    "attention": (
        "are projections that nn.MultiheadAttention keeps as parameters",
        "own-projections",
        "write the projections as nn.Linear and call scaled_dot_product_attention",
        "q, k, v = self.in_proj(x).chunk(3, -1)   # in_proj = nn.Linear(width, 3 * width)\nx = "
        "functional.scaled_dot_product_attention(q, k, v)",
    ),
    "class": (
        "are of a class that is not nn.Linear",
        "convert-before-lora",
        "convert the plain Linears first, then add LoRA around them",
        "# torchtune's LoRALinear is not nn.Linear: build the model without it, then\n"
        "convert_to_float8_training(model)\nmodel = get_peft_model(model, LoraConfig(...))   # peft",
    ),
    "computed": (
        "compute their weight in each forward (weight_norm, spectral_norm), so torchao's conversion raises",
        "convert-before-parametrizing",
        "convert first, then parametrize the converted layer's weight",
        "# a sketch: the plain Linear, then its conversion, then its parametrization\n"
        "convert_to_float8_training(model)\nlayer = weight_norm(model.layer)",
    ),
    "end": (
        "are the first or the last Linear, which Accelerate's torchao path skips",
        "own-filter",
        "convert with your own filter that leaves out only the head",
        'Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig('
        'pad_inner_dim=True), module_filter_func=lambda module, name: name != "lm_head")])',
    ),
    "filter": (
        "were left out by the conversion's filter",
        "convert-the-rest",
        "widen the filter: every Linear with sides divisible by 16, except the head",
        "wanted = lambda module, name: not (module.in_features % 16 or module.out_features % 16 or "
        "name.endswith('lm_head'))\n"
        "convert_to_float8_training(model, module_filter_fn=wanted)",
    ),
}
"""Why a layer was not converted, completing "14 layers ..."; and the fix: name, summary and lines."""


OLD_EXPERTS = (
    "# MoETrainingConfig: torchao.prototype.moe_training.conversion_utils, torchao 0.12 to 0.16\n"
    'quantize_(model, MoETrainingConfig(), filter_fn=lambda module, name: type(module).__name__ == "{kind}")'
)
"""The lines for experts before torchao 0.17."""


@check(
    "MOD004",
    "partial-conversion",
    area="engagement",
    severity="warning",
    changes_fp8=True,
    invalidates_model=True,
    explained_by=("GPU001", "MOD009"),
)
def partial_conversion(facts: Facts) -> Finding | NotApplicable | None:
    linears = facts.network.linears
    fp8 = [linear for linear in linears if linear.use == "training"]
    if not fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    left = [
        each
        for each in linears
        if would_be_converted(each, roles=("body", "experts"), rewritten=True) and pays(each, fp8, facts)
    ]
    if left and not shares_are_known(facts):
        return experts_left_out(left, fp8, facts)
    done, missing = flops_share_pct(fp8, facts), flops_share_pct(left, facts)
    if missing < WORTH_MENTIONING_PCT:
        return None
    why: dict[str, list[Linear]] = {}
    for linear in left:
        why.setdefault(reason(linear, fp8, facts), []).append(linear)
    shares = {each: flops_share_pct(members, facts) for each, members in why.items()}
    chosen = missing - shares.get("filter", 0.0) < WORTH_MENTIONING_PCT and done >= MOST * (done + missing)
    main = max(shares, key=lambda each: shares[each])
    _, name, summary, code = REASONS[main]
    ceilings = most_of_the_gemms(done, done + missing, facts)
    said = "; ".join(
        f"{plural(len(members), 'layer')} ({percent(shares[each])}) {REASONS[each][0]}"
        for each, members in why.items()
    )
    return Finding(
        severity="info" if chosen else None,
        title=f"Only {percent(done)} of the matmul FLOPs are in FP8; {percent(missing)} more could be",
        explanation=f"{said}. {in_words(ceilings, facts)}",
        evidence={
            "fp8_share_pct": round(done, 1),
            "missing_share_pct": round(missing, 1),
            "missing_layers": len(left),
            "reasons": tuple(why),
            "first": why[main][0].name,
            "ceiling_now": ceilings and round(ceilings[0], 2),
            "ceiling_with_all": ceilings and round(ceilings[1], 2),
        },
        treatment=Treatment(name=name, summary=summary, code=lines(main, why[main], left, facts) or code),
    )


def experts_left_out(left: list[Linear], fp8: list[Linear], facts: Facts) -> Finding:
    """Report experts in 16 bits by their weights. Raises `Unrecorded` for other layers without shares."""
    experts = [each for each in left if each.role == "experts"]
    if not experts:
        raise Unrecorded(Linear, "flops_share_pct")
    share = 100 * sum(map(weights, experts)) / sum(map(weights, facts.network.linears))
    why = reason(experts[0], fp8, facts)
    phrase, name, summary, code = REASONS[why]
    return Finding(
        title=f"{plural(len(experts), 'expert weight')} stayed in 16 bits next to FP8: {percent(share)} of "
        "all Linears' weights",
        explanation=f"They {phrase}. Neither their modules nor a configuration says how many experts a "
        "token visits, so their share of the matmul FLOPs is unknown.",
        evidence={"weights_share_pct": round(share, 1), "missing_layers": len(experts), "reasons": (why,)},
        treatment=Treatment(name=name, summary=summary, code=lines(why, experts, left, facts) or code),
    )


def weights(linear: Linear) -> int:
    return linear.in_features * linear.out_features * linear.gemms


def lines(why: str, layers: list[Linear], left: list[Linear], facts: Facts) -> str | None:
    """The lines with what only this model has: the class of its experts, the layers to leave out."""
    if why == "experts":
        code = REASONS[why][-1] if has_op_configs(facts) else OLD_EXPERTS
        return code.format(kind=layers[0].kind.rpartition(".")[2])
    if why == "sibling":
        switched = exported(facts, ACCELERATE_FP8_BACKEND="AO")
        return f"{switched}   # or choose widths divisible by 16 in the model's configuration"
    if why not in ("filter", "wrapped", "end") or any(
        linear.stack == "transformer_engine" for linear in facts.network.linears
    ):
        return None
    out = [linear.name for linear in facts.network.linears if linear not in left and may_be_taken(linear)]
    return if_recorded(convert_all_but, out, facts)


def pays(linear: Linear, fp8: list[Linear], facts: Facts) -> bool:
    """Whether FP8 makes this layer faster: by torchao's filter, the fixes, and the cost model."""
    if too_small(linear, rowwise=linear.role == "experts" or recipe_of(fp8[0]).granularity == "row"):
        return False
    if if_recorded(would_lose, linear, facts, fp8[0].recipe):
        return False
    rows = rows_of(linear, facts) if is_given(facts) else None
    if not rows or linear.role == "experts":
        return True
    gpu = gpu_with_fp8(facts)
    if gpu is None:
        return True
    cost = linear_cost(linear, rows, gpu)
    if cost is None:
        return False
    casts = casts_ms(rows, linear.in_features, linear.out_features, gpu, compiled=True)
    return cost.saved_ms - casts > ERROR * cost.bf16_ms


def reason(linear: Linear, fp8: list[Linear], facts: Facts) -> str:
    """Say why this layer was not converted, as a key of `REASONS`."""
    if linear.kind.endswith(".Conv1D"):
        return "conv1d"
    if linear.role == "experts" and linear.gemms > 1:
        return "experts_as_they_lie" if linear.features.get("grouped_gemm") is False else "experts"
    if linear.features.get("functional"):
        return "attention"
    if linear.kind in NO_LINEAR:
        return "class"
    if linear.features.get("computed_weight"):
        return "computed"
    if is_behind_a_stop(linear, facts):
        return "sibling"
    if is_wrapped(linear, facts.training) and not any(is_wrapped(each, facts.training) for each in fp8):
        return "wrapped"
    ends = [
        each
        for each in facts.network.linears
        if not each.features.get("functional")
        and each.role != "experts"
        and not each.kind.endswith(".Conv1D")
    ]
    accelerated = may_have_converted(facts) and any(each.stack == "torchao" for each in fp8)
    return "end" if accelerated and linear in (ends[0], ends[-1]) else "filter"


def is_behind_a_stop(linear: Linear, facts: Facts) -> bool:
    """Whether an unaligned sibling stopped Accelerate's conversion to Transformer Engine."""
    if not any(link.startswith(TE_AUTOCAST) for link in facts.training.forward_chain):
        return False
    for each in facts.network.linears:
        if each is linear:
            return False
        unaligned = not fits_fp8(each)
        parent, dot, _ = each.name.rpartition(".")
        if (
            each.use == "none"
            and each.role != "experts"
            and unaligned
            and linear.name.startswith(parent + dot)
        ):
            return True
    return False


def is_wrapped(linear: Linear, training: Training) -> bool:
    """Whether a ``torch.compile`` wrapper stands in this layer's true name."""
    marks = [mark.name for mark in training.compile_marks if mark.form == "wrapped"]
    return any(is_below(linear, name) for name in marks)


def most_of_the_gemms(now: float, then: float, facts: Facts) -> tuple[float, float] | None:
    """Bound the matmuls' speedup by Amdahl's law, from percent in FP8; None without the GPU's peak."""
    gpu = gpu_with_fp8(facts)
    if gpu is None:
        return None
    at_full = large_gemm_speedup(gpu)
    return amdahl(min(now, 100.0) / 100.0, at_full), amdahl(min(then, 100.0) / 100.0, at_full)


def in_words(ceilings: tuple[float, float] | None, facts: Facts) -> str:
    """Write the bounds, or ask for a GPU that gives them."""
    gpu = gpu_with_fp8(facts)
    if gpu is None or ceilings is None:
        return "fp8doctor has no estimate of the gain: it knows no FP8 datasheet for this GPU (--assume-gpu)."
    return (
        f"Upper bound for the matmuls by Amdahl's law: {ceilings[0]:.2f}x now, {ceilings[1]:.2f}x with these "
        f"layers ({gpu.name}, without the casts)."
    )


def gpu_with_fp8(facts: Facts) -> GpuSpec | None:
    """The modelled GPU; None if it has no FP8 or no datasheet."""
    gpu = modelled_gpu(facts)
    return gpu if gpu is not None and gpu.fp8_tflops else None


def _blocks(**second: Any) -> Facts:
    marks = (CompileMark(name="blocks.1", form="wrapped", backend="inductor"),)
    linears = (float8(flops_share_pct=50.0), float8("blocks.1.up", flops_share_pct=50.0, **second))
    workload = {"batch_source": None, "tokens": None}
    return example(linears=linears, **workload, compile_marks=marks, forward_chain=(), accelerate=None)


FIRES = _blocks(
    kind="torch.nn.modules.linear.Linear", stack="torch", use="none", recipe=None, in_features=4096
)
SILENT = _blocks()
