"""Layers too small to pay for their casts

FP8 halves the time of a large matmul, which grows with M x K x N. Its casts grow only with M x K, K x N and M
x N. If K or N is small, the casts cost more than the matmul saves, compiled too. Such layers are key and
value projections of grouped-query attention, a head with few classes, a router, LoRA's A and B. In a router
or a head, rounding also goes straight into the choice of experts or into the loss.

    convert_to_float8_training(model)  # before: all of them

    from torchao.float8 import convert_to_float8_training
    small = {f"model.layers.{i}.self_attn.k_proj" for i in range(32)}
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in small)  # after

Convert the base before `get_peft_model`. A layer must be 25% slower by the estimate, which is its error; a
trial times the step without layers that lose less. All together must cost 2% of the matmul time. Ignore it if
you convert everything to study numerics. A head as wide as a vocabulary can gain speed: that is information.
https://github.com/pytorch/torchtitan/issues/1207
"""

from collections import Counter

from fp8doctor import kit

LOSES = "which can cost accuracy"
PAYS = 1.10  # speedup of experts below which their casts are reported: a choice


@kit.check("SHP002", "gemms-too-small", severity="warning", was="SHP004", changes_fp8=True)
def gemms_too_small(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    gpu = kit.cost.modelled_gpu(facts)
    if gpu is None or not kit.layer_gain.gains(facts):
        none = kit.NotApplicable(reason="no FP8 layer with known shape, recipe, tokens and GPU datasheet")
        return kit.if_recorded(small_experts, facts) or none
    found = kit.layer_gain.losing(facts)
    fp8 = facts.network.fp8
    kept = kit.own_step.kept_in_bf16(facts.network.linears)
    layers = [each for each in fp8 if each.name in found and each.name not in kept]
    lost = [found[each.name] for each in layers]
    if not layers:
        return None
    shapes = Counter(f"{each.in_features} x {each.out_features}" for each in layers).most_common()
    shown = ", ".join([shape for shape, _ in shapes[:3]] + ["..."] * (len(shapes) > 3))
    parts = ("bf16_ms", "fp8_ms", "casts_ms")
    bf16, in_fp8, casts = (sum(gain.times * getattr(gain, part) for gain in lost) for part in parts)
    ms = {"bf16_gemms_ms": bf16, "fp8_gemms_ms": in_fp8, "casts_ms": casts}
    digits = 2 if bf16 >= 1 else 3
    which = ""
    if apart := next((each for each in layers if each.role in kit.layer_gain.APART), None):
        which = f"{':' if len(layers) == 1 else ', with'} the {apart.role} {apart.name}, {LOSES}"
    return kit.Finding(
        title=f"{kit.plural(len(layers), 'layer')} of {len(fp8)} (in x out {shown}) "
        f"{'is' if len(layers) == 1 else 'are'} too small to gain from FP8 (estimated){which}",
        explanation=f"Estimated for {gpu.name}: their matmuls take {bf16:.{digits}f} ms/step in BF16 and "
        f"{in_fp8:.{digits}f} ms in FP8, their casts {casts:.{digits}f} ms.",
        evidence={"losing_layers": len(layers), "first": layers[0].name, **ms},
        treatment=kit.stay_in_bf16(facts, "FP8 pays off for none of these shapes (estimated)")
        if kit.layer_gain.pays_for_none(facts)
        else kit.keep_in_bf16([each.name for each in layers], facts),
    )


def small_experts(facts: kit.Facts) -> kit.Finding | None:
    """Report MXFP8 experts whose casts take what their matmuls save, modelled for a user's batch."""
    gpu = kit.cost.modelled_gpu(facts)
    if gpu is None or not kit.layer_gain.is_given(facts):
        return None
    costed = ((each, kit.cost.mxfp8_experts(each, facts, gpu)) for each in facts.network.fp8)
    known = [(each, cost) for each, cost in costed if cost and cost.casts_ms]
    passes = kit.cost.micro_batches(facts)
    bf16, in_fp8, casts = (passes * sum(cost[i] or 0.0 for _, cost in known) for i in range(3))
    if not known or bf16 >= PAYS * (in_fp8 + casts):
        return None
    first = known[0][0]
    rows = (kit.cost.routed_rows(first, facts) or 0) // first.gemms
    return kit.Finding(
        severity="info",
        title=f"MXFP8 casts of {kit.plural(len(known), 'expert weight')} cost {casts:,.1f} ms per step; the "
        f"matmuls save {bf16 - in_fp8:,.1f} ms (estimated)",
        explanation=f"Estimated for {gpu.name}. Each of {first.gemms} experts in {first.name} gets {rows:,} "
        "rows: the fewer rows, the larger the weights' share of the casts.",
        evidence={"bf16_gemms_ms": bf16, "fp8_gemms_ms": in_fp8, "casts_ms": casts, "rows_of_each": rows},
    )


@kit.check("SHP002", "vocabulary-in-fp8", severity="info", changes_fp8=True)
def vocabulary_in_fp8(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    head = next((each for each in facts.network.fp8 if kit.layers.makes_logits(each, facts.network)), None)
    if head is None:
        return kit.NotApplicable(reason="no vocabulary's head is in FP8")
    kept = kit.if_recorded(kit.layer_gain.to_keep, facts) or ()
    if head.name in kept or head.name in kit.own_step.kept_in_bf16(facts.network.linears):
        return None
    return kit.Finding(
        title=f"The head over {head.out_features:,} tokens is in FP8, {LOSES}: {head.name}",
        explanation="Its rounding goes straight into the loss. Recipes that train well keep it in BF16.",
        evidence={"first": head.name, "out_features": head.out_features},
        treatment=kit.keep_in_bf16([head.name], facts),
    )


@kit.check("SHP002", "adapters-converted", severity="warning", was="LORA003", changes_fp8=True)
def adapters_converted(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    adapters = [linear for linear in facts.network.linears if linear.adapter == "adapter"]
    if not adapters:
        return kit.NotApplicable(reason="no LoRA in the model")
    converted = [linear for linear in adapters if linear.use == "training"]
    if not converted:
        return None
    first = converted[0]
    code = "base, optimizer = accelerator.prepare(base, optimizer)\nmodel = get_peft_model(base, config)"
    if first.stack == "torchao":
        code = kit.conversion.conversion(facts)
    return kit.Finding(
        title=f"{len(converted)} of {len(adapters)} LoRA matrices were converted to FP8"
        f"{kit.named(converted, len(adapters))}",
        explanation="Casting their inputs and gradients costs more than FP8 can save on such thin matrices. "
        "The conversion ran after the adapters were added.",
        evidence={"converted_adapters": len(converted), "adapters": len(adapters), "first": first.name},
        treatment=kit.Treatment(
            name="convert-base-first",
            summary="convert the base before get_peft_model, or keep the adapters out of the conversion",
            code=code,
        ),
    )


def _model(*layers: kit.Linear) -> kit.Facts:
    return kit.example(linears=layers, batch_source="given", tokens=8192, vocabulary=32000)


_SQUARE = kit.float8("up", in_features=2048, out_features=2048, flops_share_pct=50.0)
_THIN = kit.float8("k", in_features=2048, out_features=64, flops_share_pct=50.0)
_HEAD = kit.float8("head", in_features=2048, out_features=32000, role="head", flops_share_pct=50.0)
_ADAPTER = kit.float8("up.lora_A", in_features=2048, out_features=16, adapter="adapter", flops_share_pct=1.0)
FIRES = (_model(_SQUARE, _THIN), _model(_HEAD, _ADAPTER))
SILENT = _model(_SQUARE)
