"""Attention runs as plain matmuls and a softmax

A fused kernel (flash, cuDNN, memory-efficient) never writes the scores to memory. Eager attention and torch's
math backend do, the latter in fp32: heads x tokens x tokens, in several passes forward and backward. This
grows with the square of the sequence. FP8 leaves attention as it is, so its share grows, and BF16 gains as
much from the fix. In T5-large it took 17% of the GPU's time (`h200-t5_large`).

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")  # before

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")   # after

Let torch choose. If torch itself falls back, a mask is the usual cause: flash takes none, and cuDNN none that
needs a gradient. Every fused backend needs stride 1 in the last dimension (T5 before transformers 5.20).

Ignore it if something needs eager attention: `output_attentions=True`, capped logits (Gemma 2), or a class
without another (not reported). Only a profile shows which backend a call takes.
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
"""

import re

from packaging.version import Version

from fp8doctor import kit

CONTIGUOUS_BIAS = "5.20.0"
"""First transformers whose ``create_position_bias_mask`` returns a contiguous mask:
``integrations/sdpa_attention.py`` of 5.17.0 to 5.19.0 and of 5.20.0, 5.22.0, 5.23.0."""

T5_FAMILY = re.compile(r"\.models\.(t5|mt5|umt5|longt5|switch_transformers|pop2piano|udop)\.")
"""Models of transformers 5.17 that permute a learned position bias and hand it to the attention."""

UPGRADE_TRANSFORMERS = kit.Treatment(
    name="contiguous-position-bias",
    summary=f"use transformers {CONTIGUOUS_BIAS} or newer, whose position bias fits a fused kernel",
    code=f'pip install "transformers>={CONTIGUOUS_BIAS}"',
)
CALL_TORCHS = kit.Treatment(
    name="call-fused-attention",
    summary="compute attention with torch's own function, in 16 bits, with is_causal instead of a mask",
    code="output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)",
)
MATH = "torch uses its math backend, which computes in fp32."


@kit.check("MEM004", "slow-attention-backend", severity="warning")
def slow_attention_backend(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    attentions = facts.network.attentions
    eager = [each for each in attentions if each.implementation == "eager"]
    avoidable = [each for each in eager if each.has_sdpa and not each.needs_eager]
    torchs = [each for each in attentions if each.implementation == "sdpa"]
    now = kit.step_difference.step_on_gpu(facts)  # on a CPU, torch takes other backends
    unfused = kit.step_difference.plain_attention(now) if now else None
    evidence: dict[str, kit.facts.Value | tuple[kit.facts.Value, ...]] = {}
    why = ""
    if unfused:
        evidence |= {"unfused_ms": unfused.total_ms, "share_pct": unfused.share_pct}
        parts = "its softmax, matmuls and the kernels between them"
        why = f"In the profiled step, {parts} take at least {unfused.total_ms:,.1f} ms."
    if avoidable:
        names = ", ".join(dict.fromkeys(each.kind.rpartition(".")[2] for each in avoidable))
        evidence["eager"] = tuple(each.name or "the model" for each in avoidable)
        title = f"Eager attention runs in {names} instead of torch's fused kernels"
        why = f"transformers supports torch's fused attention here, and nothing needs eager attention. {why}"
        switch = kit.in_python(f"{avoidable[0].name}.set_attn_implementation".lstrip("."), facts.network)
        treatment = kit.Treatment(
            name="attention-sdpa",
            summary="use torch's fused attention",
            code=f'{switch}("sdpa")   # or attn_implementation="sdpa" in from_pretrained',
        )
    elif eager:
        needed = eager[0].needs_eager or "transformers names no other for this class"
        return kit.NotApplicable(reason=f"attention must be eager here: {needed}")
    elif unfused:
        title = f"Attention without a fused kernel takes {kit.percent(unfused.share_pct)} of the GPU's time"
        because, treatment = why_not_fused(facts, torchs)
        why = f"{why} {because}"
    elif attentions:
        return None
    else:
        return kit.NotApplicable(reason="neither a configuration nor a profiled GPU step shows the attention")
    return kit.Finding(title=title, explanation=why.strip(), evidence=evidence, treatment=treatment)


def why_not_fused(facts: kit.Facts, torchs: list[kit.facts.Attention]) -> tuple[str, kit.Treatment]:
    """Say why torch's attention falls back, as far as the facts show it, and what helps."""
    version = kit.installed(facts, "transformers")
    if version and version < Version(CONTIGUOUS_BIAS) and any(T5_FAMILY.search(each.kind) for each in torchs):
        why = f"Before {CONTIGUOUS_BIAS}, transformers passes the position bias as a permuted view, which no "
        return f"{why}fused backend takes: {MATH}", UPGRADE_TRANSFORMERS
    return f"If no fused backend accepts a call of torch's attention, {MATH}", CALL_TORCHS


def _llama(implementation: str) -> kit.Facts:
    attention = kit.facts.Attention(
        name="", kind="transformers.Llama", implementation=implementation, has_sdpa=True, needs_eager=None
    )
    return kit.example(attentions=(attention,), wrappers=())


FIRES = _llama("eager")
SILENT = _llama("sdpa")
