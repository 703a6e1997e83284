"""The training step of a model: matmuls, casts, attention, loss, optimizer, rest.

It is rough where the facts are. Attention is recognized by the names of its projections, the width of its
heads is assumed, and norms, activations and residuals are counted by the inputs and outputs of the Linears
around them. There is no guess where it has no numbers: experts whose rows are unknown, emulated FP8, stacks
and recipes that were not measured, and 32-bit weights without autocast give None. All constants: one H200,
torch 2.11, torchao 0.18, TE 2.20.2, November 2026; bytes are effective, as in `fp8doctor.cost.cast_cost`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.cost.cast_cost import casts_too_many_rows, recipe_on
from fp8doctor.cost.gemm import aligned_tokens, gemm_ms, scaled_gemm_ms, step_gemms_ms
from fp8doctor.cost.grouped import (
    casts_of,
    in_one_kernel,
    launches,
    published_ms,
    routed_rows,
    rows_of_one,
)
from fp8doctor.cost.matmul_counts import (
    RECOMPUTED,
    TE_RECOMPUTE_HOST_MS,
    calls_of,
    gemms,
    is_recomputed,
    may_be_recomputed_by_te,
    micro_batches,
    recomputed_by_te,
    rows_of,
    rows_seen,
    step_tokens,
    unseen_recompute,
)
from fp8doctor.facts import Facts, Family, Linear, Network, recorded
from fp8doctor.gpus import GpuSpec, memory_ms, modelled_gpu
from fp8doctor.recipes import RECIPES, UNKNOWN, Launch, stack_of

ATTENTION_EFFICIENCY = {64: 0.264, 128: 0.407}
"""Width of a head -> share of the BF16 peak that causal attention reaches in forward and backward together:
11.05 ms for 24 layers of 16 heads and 16 x 1024 tokens, 4.79 ms for 4 layers of 32 heads and 4 x 2048 tokens;
cuDNN."""

ATTENTION_TOKENS = {64: (1024, 952), 128: (2048, 686)}
"""Tokens of the sequence that this share was measured with, and those at which causal attention reaches half
of its best: 242, 318 and 416 TFLOP/s of width 64 with 1024, 2048 and 8192 tokens, 447 and 551 of width 128
with 2048 and 8192 (tests/benchmarks/measured/h200_sweep.json.gz). Tiles on the diagonal are computed whole,
and the shorter the sequence, the more of them are. Without a mask there is one measurement."""

NARROW_HEADS_UP_TO = 2048
"""Width of attention up to which heads count as 64 wide, above as 128: as in GPT-2, Llama 1B and 8B."""

BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of attention's backward / forward: five products, not two. Source: arXiv 2307.08691."""

LOSS_BYTES = {"16bit": 19.0, "fp32": 50.0}
"""Bytes per logit of the cross entropy, forward and backward. fp32, as transformers and most people's own
``.float()`` have it: 34 for log-softmax, measured (4.17 ms for 4096 x 128256), 16 counted for the conversions
and fills; in 16 bits half of the first and 2."""

OPTIMIZER_BYTES = 24.0
"""Bytes per trainable parameter of a fused AdamW step in 16 bits: 43.9 ms for 8.03 B. It moves 14."""


FP32_OPTIMIZER_BYTES = 28.0
"""The same for fp32 parameters: it reads four tensors and writes three. Counted; 762 M took 34.6 and 31.6
(h200- and h100-whisper_medium)."""

KERNELS = 10
"""Kernels of a step / its Linears in 16 bits, all else included: 8.4 to 13.2 counted, eager or compiled."""

GAP_MS = 0.001
"""Idle time between two kernels: 0.6 to 3 us, the steps of seven variants less the time of their kernels."""

QUERIES = ("q", "q_proj", "q_b_proj", "query", "wq", "to_q", "linear_q")


FUSED_QUERIES = (
    "qkv",
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "in_proj",
    "Wqkv",
    "wqkv",
    "to_qkv",
    "linear_qkv",
)
"""Last part of the name of a Linear that every attention has once."""

OWN_FORWARD = "own_forward"
"""Feature of a layer that is FP8 by descent and computes what it wants."""


class ModelledStep(Struct, frozen=True):
    """One step at full depth, with its parts."""

    families_ms: dict[Family, float]
    busy_ms: float
    host_ms: float
    step_ms: float
    """The slower of GPU and host."""
    gpu: str
    compiled: bool = False
    """True if `modelled_bf16` compiled all of it."""

    @property
    def idle_ms(self) -> float:
        return max(0.0, self.step_ms - self.busy_ms)


def modelled_step(
    facts: Facts, gpu: GpuSpec | None = None, *, loss: Literal["fp32", "16bit"] = "fp32"
) -> ModelledStep | None:
    """Model the step on ``gpu``, or the modelled one; None if numbers are missing."""
    gpu = gpu or modelled_gpu(facts)
    if gpu is None or not recorded(facts, "network.linears") or not consists_of_linears(facts.network):
        return None
    if unseen_recompute(facts) is not None:
        return None
    families: dict[Family, float] = dict.fromkeys(
        ("gemm_fp8", "gemm_16bit", "gemm_fp32", "cast", "attention", "pointwise", "loss"), 0.0
    )
    host = kernels = recompute = 0.0
    how, autocast = uncompiled(facts), facts.get("training.autocast") == "bfloat16"
    for linear in facts.network.linears:
        rows, calls = rows_of(linear, facts), calls_of(linear, facts)
        if linear.get("role") == "experts":
            rows, calls = routed_rows(linear, facts), 1
        fp32 = linear.adapter == "adapter" and linear.dtype == "float32" and linear.use == "none"
        fp32 = fp32 and not facts.get("training.autocast")  # PEFT's, under no known autocast
        parts = layer_ms(linear, rows, gpu, how, fp32=fp32, autocast=autocast) if rows else None
        if parts is None:
            return None
        for family, time in parts.items():
            families[family] += calls * time
        count = calls * launches(linear)
        host += count * HOST_MS["compiled" if linear.compiled is not None else "eager"]
        kernels += count * KERNELS
        if linear.use == "training":
            host += count * launch_of(linear).host_ms
            kernels += count * launch_of(linear).kernels
        if may_be_recomputed_by_te(linear, facts):
            recompute += count * TE_RECOMPUTE_HOST_MS
    families["attention"] += attention_ms(facts, gpu)
    families["loss"] += loss_ms(facts, gpu, LOSS_BYTES[loss])
    accumulate = micro_batches(facts)
    families = {family: time * accumulate for family, time in families.items()}
    families["optimizer"] = optimizer_ms(facts.network, gpu)
    busy = sum(families.values())
    host *= accumulate
    paced_by_gpu = busy + GAP_MS * kernels * accumulate
    if recompute and host + recompute * accumulate > paced_by_gpu:
        return None
    return ModelledStep(families, busy, host, max(paced_by_gpu, host), gpu.name)


def consists_of_linears(network: Network) -> bool:
    """Return whether Linears and an embedding hold most parameters, not convolutions."""
    if not all(recorded(each, "parameters") for each in (network, *network.linears)):
        return bool(network.linears)
    held = sum(each.parameters for each in network.linears)
    if has_vocabulary(network) and recorded(network, "hidden_size"):
        held += (network.vocabulary or 0) * (network.hidden_size or 0)
    return bool(network.linears) and 2 * held >= network.parameters


def layer_ms(
    linear: Linear, rows: int, gpu: GpuSpec, eager_how: str, *, fp32: bool = False, autocast: bool = False
) -> dict[Family, float] | None:
    """Model one call of a Linear and its surroundings; None without numbers for it."""
    fp8 = linear.use == "training"
    recipe = recipe_on(linear, gpu) if fp8 else None
    features = linear.get("features", {})
    if (
        features.get("emulate")
        or features.get(OWN_FORWARD)
        or linear.use == "storage"
        or casts_too_many_rows(linear, rows)
        or (linear.dtype == "float32" and linear.adapter != "adapter" and not autocast)
    ):
        return None
    m, k, n = rows_of_one(linear, rows), linear.in_features, linear.out_features
    eager = linear.compiled is None
    scaled = RECIPES.get((linear.stack, recipe or ""), UNKNOWN)
    cast = casts_of(linear, scaled, m, gpu, compiled=not eager) if fp8 else 0.0
    if cast is None:
        return None
    thrown_away = fp8 and eager and stack_of(linear).frozen_gradient
    trained = linear.requires_grad is not False or thrown_away
    tall = aligned_tokens(m)
    groups = in_one_kernel(linear)
    both = step_gemms_ms(m, k, n, gpu, fp8=fp8, weight_gradient=trained, recipe=scaled, groups=groups)
    forward = gemm_ms(tall, k, n, gpu, fp8=False, groups=groups)
    if fp8:
        forward = scaled_gemm_ms(tall, k, n, gpu, scaled, groups=groups)
    if groups > 1 and gpu.compute_capability.startswith("10."):
        known = published_ms(m, k, n, gpu, scaled if fp8 else None)
        forward, both = (known[0], sum(known[: 2 + trained])) if known else (None, None)
    if forward is None or both is None:
        return None
    again = is_recomputed(linear)
    around = between_ms(linear, m, gpu, eager_how if eager else "compiled")
    if linear.dtype == "float32" and autocast:
        around += memory_ms(WEIGHT_CAST_BYTES * k * n, gpu)
    if not eager and linear.get("bias"):
        apart = fp8 and stack_of(linear).fuses_casts
        around += memory_ms(BIAS_BYTES["fp8" if apart else "16bit"] * m * n, gpu)
    in_16bit = 0.0
    if fp8 and scaled.weight_gradient_in_16_bits and trained:
        in_16bit = gemm_ms(k, tall, n, gpu, fp8=False) or 0.0
    gemm = both - in_16bit + (forward if again else 0.0)
    count = gemms(linear)
    if fp32:
        gemm = max(gemm, memory_ms(FP32_ADAPTER_BYTES * m * (k + n), gpu))
    if again:
        casts = (m * k + k * n) / (m * k + k * n + m * n) if recomputed_by_te(linear) else RECOMPUTED["casts"]
        cast, around = cast * (1 + casts), around * (1 + RECOMPUTED["between"])
    return {
        "gemm_fp8": count * gemm if fp8 else 0.0,
        "gemm_16bit": count * (in_16bit if fp8 else 0.0 if fp32 else gemm),
        "gemm_fp32": count * gemm if fp32 else 0.0,
        "cast": count * cast,
        "pointwise": count * around,
    }


def launch_of(linear: Linear) -> Launch:
    """Tell how the FP8 of a layer is launched."""
    stack = stack_of(linear)
    return stack.eager if linear.compiled is None else stack.compiled


def attention_ms(facts: Facts, gpu: GpuSpec) -> float:
    """Model attention of each layer with a query projection; causal with a vocabulary."""
    causal = has_vocabulary(facts.network)
    return sum(
        flops / (gpu.bf16_tflops * 1e9 * attention_efficiency(head, longest, causal=causal))
        for flops, head, longest in attention_flops(facts)
    )


def attention_flops(facts: Facts) -> Iterator[tuple[float, int, float]]:
    """Count the FLOPs of attention in a step, by layer, with the widths of a head and of a sequence.

    A layer that sees more rows than the tokens, such as an encoder next to a decoder, has longer sequences in
    proportion.
    """
    length = facts.get("workload.sequence_length")
    tokens = step_tokens(facts)
    if not length or not tokens:
        return
    causal = 0.5 if has_vocabulary(facts.network) else 1.0
    for linear in facts.network.linears:
        last = linear.get("name", "").removesuffix(".base_layer").rpartition(".")[2]
        if linear.adapter == "adapter" or last not in QUERIES + FUSED_QUERIES:
            continue
        width = linear.in_features if last in FUSED_QUERIES else linear.out_features
        rows = rows_of(linear, facts) or tokens
        longest = length * rows / tokens
        times = 1 + BACKWARD_OF_ATTENTION + is_recomputed(linear)
        flops = 4.0 * calls_of(linear, facts) * rows * longest * width * causal * times
        yield flops, 64 if width <= NARROW_HEADS_UP_TO else 128, longest


def attention_efficiency(head: int, tokens: float, *, causal: bool) -> float:
    """Return the share of the BF16 peak that attention over so many tokens reaches."""
    at, half = ATTENTION_TOKENS[head]
    longer = (at + half) / at * tokens / (tokens + half) if causal else 1.0
    return ATTENTION_EFFICIENCY[head] * longer


def loss_ms(facts: Facts, gpu: GpuSpec, bytes_per_logit: float) -> float:
    """Model the cross entropy over the head's outputs."""
    heads = (linear for linear in facts.network.linears if linear.role == "head")
    logits = max((linear.out_features * (rows_of(linear, facts) or 0) for linear in heads), default=0)
    return memory_ms(bytes_per_logit * logits, gpu) if has_vocabulary(facts.network) else 0.0


def has_vocabulary(network: Network) -> bool:
    return network.get("vocabulary") is not None


def optimizer_ms(network: Network, gpu: GpuSpec) -> float:
    """Model a fused AdamW step."""
    trained = network.get("trainable_parameters", 0)
    in_fp32 = all(linear.dtype == "float32" for linear in network.linears)
    return memory_ms((FP32_OPTIMIZER_BYTES if in_fp32 else OPTIMIZER_BYTES) * trained, gpu)


def in_bf16(facts: Facts, names: Collection[str] | None = None) -> Facts:
    """Turn the FP8 Linears of these names into plain ones, or all of them."""
    plain = (
        replace(linear, use="none", stack="torch", recipe=None, features={})
        if linear.use == "training" and (names is None or linear.name in names)
        else linear
        for linear in facts.network.linears
    )
    return with_linears(facts, tuple(plain))


def with_linears_compiled(facts: Facts, *, yes: bool) -> Facts:
    """Compile every Linear of the job but a head in 16 bits, as the printed lines do; or none."""

    def is_compiled(linear: Linear) -> bool:
        return yes and (linear.role != "head" or linear.use == "training")

    linears = (replace(each, compiled="" if is_compiled(each) else None) for each in facts.network.linears)
    return with_linears(facts, tuple(linears))


def with_recipe(facts: Facts, recipe: str) -> Facts:
    """Give every FP8 Linear of the job another recipe."""
    return with_linears(
        facts,
        tuple(
            replace(linear, recipe=recipe) if linear.use == "training" else linear
            for linear in facts.network.linears
        ),
    )


def with_tokens(facts: Facts, tokens: int) -> Facts:
    """Give every micro-batch more samples, with as many tokens per step if possible."""
    now = step_tokens(facts)
    if not now:
        return facts
    rows = {
        layer: tuple(round(each * tokens / now) for each in seen)
        for linear in facts.network.linears
        if (seen := rows_seen(linear, facts)) and (layer := linear.name)
    }
    accumulate = max(1, round(micro_batches(facts) * now / tokens))
    workload = replace(facts.workload, tokens=tokens, rows=rows, accumulate=accumulate)
    more = replace(facts, workload=workload)
    return replace(more, trial=replace(facts.trial, rows=rows)) if recorded(facts, "trial.rows") else more


def with_linears(facts: Facts, linears: tuple[Linear, ...]) -> Facts:
    return replace(facts, network=replace(facts.network, linears=linears))


BIAS_BYTES = {"16bit": 7.8, "fp8": 24.4}
"""Effective bytes per output element of a compiled Linear with a bias, next to the others: its gradient is a
sum over all rows, for which the fused kernels in front of it compute their part again, and torchao adds it
outside of the matmul. 5.0 and 15.7 ms in a compiled ViT-L of 12608 rows (h200-vit_large); a decoder with GELU
and without biases has nothing of it (h100-gpt_124m_whole)."""

WEIGHT_CAST_BYTES = 12.0
"""Bytes per fp32 weight under BF16 autocast: the cast in the forward reads 4 and writes 2, that of its
gradient the reverse. Counted, not fitted."""


FP32_ADAPTER_BYTES = 29.5
"""Effective bytes per input and output element of an adapter that multiplies in fp32, its three matmuls
together: 4.9 ms for 14 adapters of rank 16 with 8192 rows (h200-lora_fp32), without tensor cores and in tiles
wider than their rank."""

BETWEEN_BYTES = {"eager": 11.2, "eager transformers": 32.0, "eager adapter": 21.0, "compiled": 6.9}
"""Effective bytes per input and output element of the Linears next to it, forward and backward: kernel time
of two decoders without matmuls, attention, optimizer and loss, uncompiled 24.0 ms at width 1024 and 7.5 at
4096, compiled 12.9 at width 1024 and 19.1 in a Llama 8B. Uncompiled blocks of transformers compute norms and
rotary embeddings in fp32, op by op: 8.5 and 16.2 ms more than compiled in Llamas of 4 layers of width 4096
and 8 of 2048. Around uncompiled adapters stands what PEFT computes, the same in any block: fitted to the BF16
step of a Llama 8B with adapters of rank 8 and 32 (354 and 345 ms). One H200, torch 2.11, transformers 5.17,
November 2026."""


def between_ms(linear: Linear, rows: int, gpu: GpuSpec, how: str) -> float:
    """Model the share of one call of a Linear; ``how`` is a key of `BETWEEN_BYTES`."""
    if linear.role == "head":
        return 0.0
    if how != "compiled" and linear.get("adapter") == "adapter":
        how = "eager adapter"
    wide = 2 if linear.dtype == "float32" and how != "eager transformers" else 1
    return wide * memory_ms(BETWEEN_BYTES[how] * rows * (linear.in_features + linear.out_features), gpu)


def uncompiled(facts: Facts) -> str:
    """Tell how it is computed if nothing is compiled."""
    of_transformers = any(each.get("kind", "").startswith("transformers.") for each in facts.blocks())
    return "eager transformers" if of_transformers else "eager"


HOST_MS = {"eager": 0.39, "compiled": 0.23}
"""Host time of a step / its Linears, everything around them included: 22.2 and 12.9 ms."""
