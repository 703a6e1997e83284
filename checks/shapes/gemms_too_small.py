"""Layers too small to pay for their casts

FP8 halves the time of a large matmul, which grows with M x K x N. It adds casts, which grow only with M x K,
K x N and M x N. If K or N is small, the casts cost more than the matmul saves, compiled too. Such layers are
key and value projections of grouped-query attention, a head with few classes, a router, LoRA's A and B. In a
router or a head, rounding also goes straight into the choice of experts or into the loss.

    convert_to_float8_training(model)  # before: all of them

    from torchao.float8 import convert_to_float8_training
    small = {f"model.layers.{i}.self_attn.k_proj" for i in range(32)}
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in small)  # after

Convert the base before `get_peft_model`, or keep "lora_" out of the conversion. On a GPU the trial times each
layer's matmuls and casts, and the whole step without these layers in FP8; otherwise both are estimated. A
layer must be 3% slower when timed, counting 45% of its casts, or 25% when estimated. All together must cost
2% of the matmul time. Ignore it if you convert everything to study numerics. A head as wide as a vocabulary
can gain speed and is only information. If rowwise scaling is the reason, see SHP005; if more tokens help,
SHP003.
https://github.com/pytorch/torchtitan/issues/1207
https://github.com/meta-pytorch/torchtune/issues/2833
https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from collections import Counter

from fp8doctor.kit import (
    Facts,
    Finding,
    Linear,
    NotApplicable,
    Treatment,
    check,
    convert_again,
    example,
    float8,
    gains,
    if_recorded,
    keep_in_bf16,
    kept_in_bf16,
    layer_gain,
    makes_logits,
    micro_batches,
    modelled_gpu,
    mxfp8_experts,
    named,
    plural,
    routed_rows,
    savings,
    stay_in_bf16,
    unaligned,
    would_be_converted,
)

GOES_INTO = {"head": "the loss", "router": "the choice of the experts"}
"""Role -> what its rounding goes straight into."""

SHAPES_SHOWN = 3
"""Shapes that the title names. A choice of length."""

PAYS = 1.10
"""Speedup of experts below which their casts are reported. A choice."""


@check("SHP002", "gemms-too-small", area="shapes", severity="warning", was="SHP004", changes_fp8=True)
def gemms_too_small(facts: Facts) -> Finding | NotApplicable | None:
    if not gains(facts):
        none = NotApplicable(reason="no FP8 layer with known shape, recipe, tokens and GPU datasheet")
        return if_recorded(_experts, facts) or none
    found = layer_gain.losing(facts)
    fp8, saved, kept = (
        facts.network.fp8,
        savings(facts).get("keep-in-bf16"),
        kept_in_bf16(facts.network.linears),
    )
    layers = [each for each in fp8 if each.name in found and each.name not in kept]
    lost = [found[each.name] for each in layers]
    if not layers or (saved is not None and 0 < saved.high < -sum(gain.most_ms for gain in lost)):
        return None  # the step saves less without them in FP8 than the layers lose alone
    in_step = ""
    if saved is not None:
        low, high = (f"{ms:.2f}".replace("-", "−") for ms in (saved.low, saved.high))
        in_step = f" The whole step was timed without them in FP8: that saves {low} to {high} ms."
    shapes = Counter(f"{each.in_features} x {each.out_features}" for each in layers).most_common()
    shown = ", ".join([shape for shape, _ in shapes[:SHAPES_SHOWN]] + ["..."] * (len(shapes) > SHAPES_SHOWN))
    apart = next((each for each in layers if each.role in GOES_INTO), None)
    bf16, in_fp8, casts = (
        sum(gain.times * getattr(gain, part) for gain in lost)
        for part in ("bf16_ms", "fp8_ms", "least_casts_ms")
    )
    timed, digits = all(gain.measured for gain in lost), 2 if bf16 >= 1 else 3
    joint = ":" if len(layers) == 1 else ", with"
    return Finding(
        title=f"{plural(len(layers), 'FP8 layer')} of {len(fp8)} (in x out {shown}) "
        f"{'is' if len(layers) == 1 else 'are'} slower than BF16, compiled too"
        f"{'' if timed else ' (estimated)'}"
        f"{f'{joint} the {apart.role} {apart.name}' if apart else ''}",
        explanation=f"{'Timed alone on' if timed else 'Estimated for'} {lost[0].gpu}: their matmuls take "
        f"{bf16:.{digits}f} ms/step in BF16 and {in_fp8:.{digits}f} ms in FP8, their casts "
        f"{'at least ' * timed}{casts:.{digits}f} ms."
        + (f" FP8 rounding in a {apart.role} goes straight into {GOES_INTO[apart.role]}." if apart else "")
        + in_step,
        evidence={
            "losing_layers": len(layers),
            "fp8_layers": len(fp8),
            "in_x_out": tuple(f"{shape}: {count}" for shape, count in shapes),
            "tokens": facts.workload.tokens,
            "first": layers[0].name,
            "bf16_gemms_ms": bf16,
            "fp8_gemms_ms": in_fp8,
            "casts_ms": casts,
            "timed_alone": timed,
        },
        saving_ms=layer_gain.saving(lost),
        treatment=stay_in_bf16(facts, "FP8 pays off for none of these shapes")
        if _pays_for_none(facts)
        else keep_in_bf16([each.name for each in layers], facts),
    )


def _pays_for_none(facts: Facts) -> bool:
    """Whether BF16 is better for every FP8 layer, and for every layer that could still be converted."""
    fp8, lose = facts.network.fp8, layer_gain.to_keep(facts)
    others = (linear for linear in facts.network.linears if if_recorded(would_be_converted, linear))
    return all(each.name in lose or if_recorded(unaligned, each) for each in fp8) and all(
        layer_gain.would_lose(linear, facts, fp8[0].recipe) for linear in others
    )


def _experts(facts: Facts) -> Finding | None:
    """Report MXFP8 experts whose casts take what their matmuls save, modelled for a user's batch."""
    gpu, layers = modelled_gpu(facts), facts.network.fp8
    if gpu is None or not layer_gain.is_given(facts):
        return None
    costs = [(each, cost) for each in layers if (cost := mxfp8_experts(each, facts, gpu)) and cost.casts_ms]
    bf16, in_fp8, casts = (
        micro_batches(facts) * sum(cost[part] or 0.0 for _, cost in costs) for part in range(3)
    )
    if not costs or bf16 >= PAYS * (in_fp8 + casts):
        return None
    first = costs[0][0]
    rows = (routed_rows(first, facts) or 0) // first.gemms
    return Finding(
        severity="info",
        title=f"MXFP8 casts of {plural(len(costs), 'expert weight')} cost {casts:,.1f} ms per step; the "
        f"matmuls save {bf16 - in_fp8:,.1f} ms (estimated)",
        explanation=f"Estimated for {gpu.name} from published kernel times. {first.name} has {first.gemms} "
        f"experts of {first.in_features} x {first.out_features}, with {rows:,} rows each. The fewer rows, "
        "the larger the weights' share of the casts.",
        evidence={"bf16_gemms_ms": bf16, "fp8_gemms_ms": in_fp8, "casts_ms": casts, "rows_of_each": rows},
    )


@check("SHP002", "vocabulary-in-fp8", area="shapes", severity="info", changes_fp8=True)
def vocabulary_in_fp8(facts: Facts) -> Finding | NotApplicable | None:
    wide = [each for each in facts.network.fp8 if makes_logits(each, facts.network)]
    kept = {*kept_in_bf16(facts.network.linears), *(if_recorded(layer_gain.to_keep, facts) or ())}
    if not wide:
        return NotApplicable(reason="no vocabulary's head is in FP8")
    if wide[0].name in kept:
        return None
    head = wide[0]
    return Finding(
        title=f"The output head over {head.out_features:,} tokens is in FP8: {head.name}",
        explanation="It need not be slower, but its rounding goes straight into the loss. Recipes that are "
        "known to train well keep the head in BF16.",
        evidence={"first": head.name, "out_features": head.out_features},
        treatment=keep_in_bf16([head.name], facts),
    )


@check("SHP002", "adapters-converted", area="shapes", severity="warning", was="LORA003", changes_fp8=True)
def adapters_converted(facts: Facts) -> Finding | NotApplicable | None:
    adapters = [linear for linear in facts.network.linears if linear.adapter == "adapter"]
    if not adapters:
        return NotApplicable(reason="no LoRA in the model")
    converted = [linear for linear in adapters if linear.use == "training"]
    if not converted:
        return None
    summary = "convert the base to Transformer Engine before get_peft_model (peft >= 0.19)"
    code = "base, optimizer = accelerator.prepare(base, optimizer)\nmodel = get_peft_model(base, config)"
    if converted[0].stack == "torchao":
        summary = "convert the base before get_peft_model, or keep the adapters out of the conversion"
        code = convert_again(facts, only='"lora_" not in name')
    return Finding(
        title=f"{len(converted)} of {len(adapters)} LoRA matrices were converted to FP8"
        f"{named(converted, len(adapters))}",
        explanation="Casting their inputs and gradients costs more than FP8 can save on such thin matrices. "
        "The conversion ran after the adapters were added.",
        evidence={
            "converted_adapters": len(converted),
            "adapters": len(adapters),
            "rank": min(min(linear.in_features, linear.out_features) for linear in converted),
            "first": converted[0].name,
        },
        treatment=Treatment(name="convert-base-first", summary=summary, code=code)
        if converted[0].stack in ("torchao", "transformer_engine")
        else None,
    )


def _model(*layers: Linear) -> Facts:
    return example(linears=layers, batch_source="given", tokens=8192, vocabulary=32000)


_UP = float8("up", in_features=2048, out_features=2048, flops_share_pct=50.0)
_HEAD = float8("head", in_features=2048, out_features=32000, role="head", flops_share_pct=50.0)
_ADAPTER = float8("up.lora_A", in_features=2048, out_features=16, adapter="adapter", flops_share_pct=1.0)
FIRES = (
    _model(_UP, float8("k", in_features=2048, out_features=64, flops_share_pct=50.0)),
    _model(_HEAD, _ADAPTER),
)
SILENT = _model(_UP)
