"""Sides or rows that a matmul kernel cannot take

An FP8 matmul needs multiples of 16 for in, out and rows: the rows are the inner side of the weight gradient's
matmul. MX formats need 32, torchao's blockwise scaling and NVFP4 128. Otherwise the layer raises on a GPU, or
a converter skips it. Rows are the batch's tokens, but a diffusion model's conditioning and a pooled head see
one row per sample, and a router decides each expert's.
In BF16, rows that do not begin at 16 bytes (multiples of 8) cost speed. A 454M decoder on an H200 took 129.8
ms/step in compiled FP8, and 95.1 ms with the vocabulary padded from 50257 to 50304
(`research/benchmarks/measured/h200_padded_vocabulary.json.gz`).

    collator = DataCollatorWithPadding(tokenizer)                         # before: 1003 tokens

    from transformers import DataCollatorWithPadding
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)  # after: 1008 tokens

Pad widths in the configuration and tokens in the collator. Leave a head's classes, layers across patches and
layers with few rows out of the conversion. `pad_inner_dim=True` pads rows at the price of a copy, but not in
and out. With sequence parallelism over TP ranks, pad the packed batch to 16 x TP tokens. Ignore the BF16 head
if the checkpoint's shape must stay.
https://github.com/pytorch/ao/issues/571
https://github.com/NVIDIA/TransformerEngine/issues/1422
"""

from fp8doctor import kit

WORTH_PCT = 5.0
"""Percent of the step from which padding in 16 bits is worth it: twice a step's noise, and a margin."""

MOST = 0.5
"""Share of the FP8 layers above which their sides are the model's widths, or their rows those of all samples,
which may be padded. Fewer may be over classes, patches or conditions, and stay out of the conversion."""


@kit.check("SHP001", "unaligned-dimensions", severity="error", **kit.WRONG_FP8_STEP)
def unaligned_dimensions(facts: kit.Facts) -> kit.Finding | None:
    fp8 = kit.own_step.multiplied_in_fp8(facts.network)
    found = [each for each in fp8 if kit.recipe_support.unaligned(each)]
    if not found:
        return None
    raises = not kit.own_step.ran_on_a_gpu(facts)
    return kit.Finding(
        severity="error" if raises else "warning",
        breaks="step_raises" if raises else kit.NOT_RECORDED,
        title=f"{len(found)} of {len(fp8)} FP8 layers must have sides that are multiples of "
        f"{kit.recipe_support.multiple_of(found[0])}, or torch raises on a GPU{kit.named(found)}",
        explanation="Every side of an FP8 matmul must be a multiple of 16 (MX 32, torchao's blockwise and "
        "NVFP4 128). Otherwise a converted layer raises in the step, and a converter leaves it in 16 bits.",
        evidence={"raising_layers": len(found), "first": found[0].name},
        treatment=kit.padding.pad_sides(found)
        if len(found) > MOST * len(fp8)
        else kit.keep_in_bf16([each.name for each in found], facts),
    )


@kit.check("SHP001", "rows-unaligned", severity="error", was="SHP007", **kit.WRONG_FP8_STEP)
def rows_unaligned(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8, workload = kit.own_step.multiplied_in_fp8(facts.network), facts.workload
    if kit.own_step.ran_on_a_gpu(facts):
        return None
    refused = kit.padding.refused_rows(fp8, facts)
    if not refused:
        given = workload.batch_source == "given"
        return None if given else kit.NotApplicable(reason="the batch is not the user's")
    of_batch = {name: need for name, (rows, need) in refused.items() if rows == workload.tokens}
    found = of_batch or refused
    first, (rows, multiple) = next((each, refused[each.name]) for each in fp8 if each.name in found)
    multiple = max(of_batch.values(), default=multiple)
    return kit.Finding(
        title=f"{kit.plural(len(found), 'FP8 layer')} of {len(fp8)} cannot multiply {rows} rows, no multiple "
        f"of {multiple}: the step raises on a GPU",
        explanation=f"In one forward, {first.name} multiplies {kit.plural(rows, 'row')}.",
        evidence={"layers": len(found), "first": first.name, "rows": rows, "multiple": multiple},
        treatment=kit.padding.pad_batch(workload, multiple)
        if of_batch or (not workload.tokens and workload.batch_size and len(refused) > MOST * len(fp8))
        else kit.keep_in_bf16([*found], facts),
        breaks="step_raises",
    )


@kit.check("SHP001", "slow-16-bit-gemm", severity="warning", was="SHP008", needs_fp8=True)
def slow_16_bit_gemm(facts: kit.Facts) -> kit.Finding | None:
    head, timed = kit.padding.odd_head(facts), kit.own_step.as_is(facts)
    fix = kit.padding.pad_vocabulary(head.out_features, facts.network) if head else None
    steps = kit.modelled_fix.modelled_steps(facts, fix) if fix else None
    if head is None or steps is None or steps.saving.middle < WORTH_PCT / 100 * steps.now.step_ms:
        return None
    parts, saving = timed.get("breakdown") if timed else None, steps.saving
    if parts is not None and parts.families_ms.get("gemm_16bit", 0.0) < saving.low:
        return None
    return kit.Finding(
        title=f"{head.name} ({head.in_features} x {head.out_features}, 16 bits) runs at a sixth of the "
        "speed, because a side is not a multiple of 8",
        explanation=f"With sides padded to multiples of {kit.cost.PADDED} its matmuls take "
        f"{saving.middle:,.1f} ms/step less (estimated for {steps.now.gpu}).",
        evidence={"first": head.name, "step_ms": steps.now.step_ms, "padded_step_ms": steps.then.step_ms},
        saving_ms=saving,
        treatment=fix,
    )


def _mlp(k: int, tokens: int) -> kit.Facts:
    head = kit.float8("head", out_features=50257 if k % 16 else 50304, use="none", role="head", recipe=None)
    layers = (kit.float8("up", in_features=k, features={}, compiled=""), head)
    batch = {"batch_source": "given", "batch_size": 1, "sequence_length": tokens, "tokens": tokens}
    model = {"linears": layers, "vocabulary": head.out_features, "blocks": (), "trainable_parameters": 10**8}
    return kit.example(
        variables={}, accumulate=1, trial=kit.facts.Trial(device="cpu", arms=()), **model, **batch
    )


FIRES = _mlp(1000, 16380)
SILENT = _mlp(1024, 16384)
