"""Sides or rows that a matmul kernel cannot take

An FP8 matmul needs multiples of 16 for in, out and rows: the rows are the inner side of the weight gradient's
matmul. MX formats need 32, torchao's blockwise scaling and NVFP4 128. Otherwise the layer raises on a GPU
("divisible by 16"), or a converter skips it. A CPU computes any size. Rows are the batch's tokens, but a
diffusion model's conditioning and a pooled head see one row per sample, and a router decides each expert's.
In BF16, rows that do not begin at 16 bytes (multiples of 8) cost speed. A 454M decoder on an H200 took 129.8
ms/step in compiled FP8, and 95.1 ms with the vocabulary padded from 50257 to 50304
(`research/benchmarks/measured/h200_padded_vocabulary.json.gz`).

    collator = DataCollatorWithPadding(tokenizer)                         # before: 1003 tokens

    from transformers import DataCollatorWithPadding
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)  # after: 1008 tokens

Pad widths in the configuration and tokens in the collator. Leave a head's classes, layers across patches and
layers with few rows out of the conversion. `pad_inner_dim=True` pads rows at the price of a copy, but not in
and out. With sequence parallelism over TP ranks, pad the packed batch to 16 x TP tokens. Ignore the BF16 head
if the checkpoint's shape must stay. `Float8LinearConfig` pads Linears of experts, `MXFP8TrainingOpConfig(
pad_token_groups_for_grouped_mm=True)` (torchao 0.17) grouped ones.
https://github.com/pytorch/ao/issues/571
https://github.com/NVIDIA/TransformerEngine/issues/1422
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
"""

from __future__ import annotations

from fp8doctor.kit import (
    NOT_RECORDED,
    Facts,
    Finding,
    NotApplicable,
    Saving,
    Treatment,
    Trial,
    check,
    convert_again,
    example,
    float8,
    flops_share_pct,
    fp8_was_asked_for,
    keep_in_bf16,
    multiple_of,
    multiplied_in_fp8,
    named,
    padding,
    plural,
    ran_on_a_gpu,
    recipe_of,
    unaligned,
    would_be_converted,
)

WORTH_PCT = 5.0
"""Percent of the step from which padding in 16 bits is worth it: twice the noise of a step, and a margin."""

UNCERTAINTY = 0.25
"""Half-width of the interval around the modelled saving (`fp8doctor.cost.eager`)."""


@check(
    "SHP001",
    "unaligned-dimensions",
    area="shapes",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def unaligned_dimensions(facts: Facts) -> Finding | NotApplicable | None:
    fp8, linears = multiplied_in_fp8(facts.network.linears), facts.network.linears
    if not fp8 and fp8_was_asked_for(facts) is None:
        return NotApplicable(reason="the model has no FP8 layer, and nothing asks for FP8")
    why_kept, refused = padding.why_not_pad(facts), [each for each in linears if unaligned(each)]
    raising = [each for each in fp8 if each in refused]
    skipped = [
        each
        for each in refused
        if would_be_converted(each, rewritten=True, padded=True) and not why_kept(each)
    ]
    share = flops_share_pct(skipped, facts)
    found = raising or (skipped if share >= padding.LITTLE_WORK_PCT else [])
    if not found:
        return None
    what = (
        f"{len(found)} of {len(fp8)} FP8 layers need sides that are multiples of {multiple_of(found[0])}, or "
        "torch raises on a GPU"
        if raising
        else f"{plural(len(found), 'Linear')} ({share:.0f}% of the matmul FLOPs) cannot be converted to FP8"
    )
    kept = {each.name: why for each in raising if (why := why_kept(each))}
    padded = [each for each in found if each.name not in kept]
    raises = bool(raising) and not ran_on_a_gpu(facts)
    return Finding(
        severity="error" if raises else "warning",
        breaks="step_raises" if raises else NOT_RECORDED,
        title=what + named(found),
        explanation="Every side of an FP8 matmul must be a multiple of 16 (MX 32, torchao's blockwise and "
        "NVFP4 128). Otherwise a converted layer raises in the step, and a converter leaves it in 16 bits.",
        evidence={"raising_layers": len(raising), "skipped_layers": len(skipped), "first": found[0].name},
        treatment=padding.pad_sides(padded, kept, facts) if padded else keep_in_bf16(list(kept), facts),
    )


@check(
    "SHP001",
    "rows-unaligned",
    area="shapes",
    severity="error",
    was="SHP007",
    changes_fp8=True,
    invalidates_model=True,
)
def rows_unaligned(facts: Facts) -> Finding | NotApplicable | None:
    fp8, workload = multiplied_in_fp8(facts.network.linears), facts.workload
    if not fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    if ran_on_a_gpu(facts):
        return None
    if experts := padding.unpadded_experts(fp8, facts):
        first, multiple, setting = experts[0], max(map(multiple_of, experts)), padding.of_experts(experts[0])
        config = "MXFP8TrainingOpConfig" if "mx" in (first.recipe or "") else "Float8TrainingOpConfig"
        code = (
            f"from torchao.prototype.moe_training.config import {config}   # torchao 0.17 or newer\n"
            f"config = {config}({setting}=True)\n"
            "quantize_(model, config, filter_fn=filter_fn)   # with your filter, instead of the old config"
        )
        if setting == "pad_inner_dim":
            code = (
                f"import dataclasses\nconfig = dataclasses.replace({recipe_of(first).config}, {setting}=True)"
            )
            code += f"\n{convert_again(facts, config='config')}"
        return Finding(
            title=f"Nothing pads each expert's rows to a multiple of {multiple} in "
            f"{plural(len(experts), 'expert weight')} of {plural(len(fp8), 'FP8 layer')}",
            explanation=f"A router decides how many rows each expert of {first.name or 'the model'} "
            f"multiplies, and {setting} is False: on a GPU the step raises, or stops with a "
            "device-side assert.",
            evidence={"layers": len(experts), "first": first.name, "multiple": multiple},
            treatment=Treatment(
                name="pad-token-groups", summary="let torchao pad the rows of each expert", code=code
            ),
            breaks="step_raises",
        )
    refused = padding.refused_rows(fp8, facts)
    if not refused:
        given = workload.batch_source == "given"
        return None if given else NotApplicable(reason="the batch is not the user's")
    of_batch = {name: need for name, (rows, need) in refused.items() if rows == workload.tokens}
    found = of_batch or refused
    first, (rows, multiple) = next((each, refused[each.name]) for each in fp8 if each.name in found)
    multiple = max(of_batch.values(), default=multiple)
    return Finding(
        title=f"{plural(len(found), 'FP8 layer')} of {len(fp8)} cannot multiply {plural(rows, 'row')}, which "
        f"{'is' if rows == 1 else 'are'} no multiple of {multiple}: the step raises on a GPU",
        explanation=f"In one forward, {first.name} multiplies {plural(rows, 'row')} of the batch's "
        f"{workload.tokens} {'tokens' if workload.sequence_length else 'rows'}. Its weight gradient's matmul "
        "raises.",
        evidence={"layers": len(found), "first": first.name, "rows": rows, "multiple": multiple},
        treatment=padding.pad_batch(workload, multiple, first)
        if of_batch
        else keep_in_bf16(list(found), facts),
        breaks="step_raises",
    )


@check("SHP001", "slow-16-bit-gemm", area="shapes", severity="warning", was="SHP008")
def slow_16_bit_gemm(facts: Facts) -> Finding | NotApplicable | None:
    if not any(linear.use == "training" for linear in facts.network.linears):
        return NotApplicable(reason="no FP8 layer in the model")
    found = padding.slow_in_16_bits(facts)
    if found is None:
        return NotApplicable(reason="the step was neither timed nor estimated")
    if not found.layers or found.saved_ms < WORTH_PCT / 100 * found.step_ms:
        return None
    first = max(found.layers, key=lambda linear: linear.in_features * linear.out_features)
    profiled = f" All 16-bit matmuls of the profiled step take {found.profiled_ms or 0:,.1f} ms."
    low, high = found.saved_ms * (1 - UNCERTAINTY), found.saved_ms * (1 + UNCERTAINTY)
    return Finding(
        title=f"{first.name} ({first.in_features} x {first.out_features}, 16 bits) runs at a sixth of the "
        "speed, because a side is not a multiple of 8"
        f"{f'; {len(found.layers) - 1} more layers do' if len(found.layers) > 1 else ''}",
        explanation=f"Matmuls of {first.name} take {found.now_ms:,.1f} ms/step now, and "
        f"{found.padded_ms:,.1f} ms with sides padded to multiples of {padding.PADDED} (estimated for "
        f"{found.gpu})."
        f"{profiled if found.profiled_ms is not None else ''}",
        evidence={
            "layers": len(found.layers),
            "first": first.name,
            "now_ms": found.now_ms,
            "padded_ms": found.padded_ms,
            "step_ms": found.step_ms,
            "profiled_16bit_gemms_ms": found.profiled_ms,
        },
        saving_ms=Saving(low=low, high=high, basis="modelled", gpu=found.gpu),
        treatment=padding.pad_in_16_bits(first, facts.network),
    )


def _mlp(k: int, tokens: int) -> Facts:
    head = float8("head", out_features=50257 if k % 16 else 50304, use="none", role="head", recipe=None)
    layers = (float8("up", in_features=k, features={}, compiled=""), head)
    batch = {"batch_source": "given", "batch_size": 1, "sequence_length": tokens, "tokens": tokens}
    model = {"linears": layers, "vocabulary": head.out_features, "blocks": (), "trainable_parameters": 10**8}
    return example(variables={}, accumulate=1, trial=Trial(device="cpu", arms=()), **model, **batch)


FIRES = _mlp(1000, 16380)
SILENT = _mlp(1024, 16384)
