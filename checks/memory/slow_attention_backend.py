"""Attention runs as plain matmuls and a softmax

What it finds. Attention does not use a fused kernel: the configuration asks for eager attention, torch's
fused backends are switched off, or no backend accepts the call.

Why it matters. A fused kernel (flash, cuDNN, memory-efficient) never writes the scores to memory. Eager
attention and torch's math backend do, the latter in fp32: heads x tokens x tokens, with several passes
forward and backward. This grows with the square of the sequence. FP8 makes the Linears faster and leaves
attention as it is, so its share grows. BF16 gains as much from the fix.

Fix. Let torch choose; it takes the fastest backend that fits each call. If torch itself falls back, a mask is
the usual cause: flash takes none, cuDNN none that needs a gradient. Every fused one needs stride 1 in its
last dimension (T5 before transformers 5.20).

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")  # before

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")   # after

When to ignore it. If something needs eager attention: `output_attentions=True`, capped logits (Gemma 2), or a
class without another. These are not reported.

How it is detected, and limits. fp8doctor reads transformers' configurations and torch's enabled backends, and
in a profiled step the kernels that attention ran. Only a profile shows which backend a call takes, because
that depends on mask, head size and dtype. MEM003 covers fp32 steps.

References. transformers 5.23, run on a CPU.
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
https://github.com/huggingface/transformers/tree/v5.20.0/src/transformers/integrations
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/sdp_utils_cpp.h
"""

from __future__ import annotations

import re

from packaging.version import Version

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.layers import in_python
from fp8doctor.analysis.step_difference import PlainAttention, plain_attention, watched_on_gpu
from fp8doctor.facts import Arm, ArmName, Attention, Facts, Network, Value, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent

FUSED = frozenset(("flash", "mem_efficient", "cudnn"))
"""Backends that never write the scores to memory. Source: ``torch.nn.attention.SDPBackend``, torch 2.13."""

CONTIGUOUS_BIAS = "5.20.0"
"""First transformers whose ``create_position_bias_mask`` returns a contiguous mask:
``integrations/sdpa_attention.py`` of 5.17.0 to 5.19.0 and of 5.20.0, 5.22.0, 5.23.0."""

T5_FAMILY = re.compile(r"\.models\.(t5|mt5|umt5|longt5|switch_transformers|pop2piano|udop)\.")
"""Models of transformers 5.17 that permute a learned position bias and hand it to the attention."""


@check("MEM004", "slow-attention-backend", area="memory", severity="warning")
def slow_attention_backend(facts: Facts) -> Finding | NotApplicable | None:
    attentions, backends = facts.network.attentions, facts.training.sdp_backends
    eager = [
        each
        for each in attentions
        if each.implementation == "eager" and each.has_sdpa and each.needs_eager is None
    ]
    now = on_gpu(facts)
    unfused = plain_attention(now) if now else None
    seen = f" {unfused_sentence(unfused)}" if unfused else ""
    evidence: dict[str, Value | tuple[Value, ...]] = {
        "sdp_backends": backends,
        **(evidence_of(unfused) if unfused else {}),
    }
    if eager:
        names = ", ".join(dict.fromkeys(each.kind.rpartition(".")[2] for each in eager))
        return Finding(
            title=f"Eager attention runs in {names} instead of torch's fused kernels",
            explanation="The configuration asks for it. transformers supports torch's fused attention for "
            f"this class, and nothing needs eager attention.{seen}",
            evidence={"eager": tuple(each.name or "the model" for each in eager), **evidence},
            treatment=fused(eager[0], facts.network),
        )
    torchs = [each for each in attentions if each.implementation == "sdpa"]
    if torchs and FUSED.isdisjoint(backends):
        return Finding(
            title="All fused backends of torch's attention are switched off",
            explanation="scaled_dot_product_attention can still use: "
            f"{' and '.join(backends) or 'nothing'}.{seen}",
            evidence={"first": torchs[0].name or "the model", **evidence},
            treatment=SWITCH_ON,
        )
    needed = [
        reason
        for each in attentions
        if each.implementation == "eager"
        if (reason := each.needs_eager or no_other(each))
    ]
    if needed:
        return NotApplicable(reason=f"attention must be eager here: {needed[0]}")
    if unfused:
        return Finding(
            title=f"Attention without a fused kernel takes {percent(unfused.share_pct)} of the GPU's time",
            explanation=" ".join(
                (
                    unfused_sentence(unfused),
                    *(["Other calls use a fused kernel."] if unfused.beside_fused else []),
                    *why(facts),
                )
            ),
            evidence=evidence,
            treatment=treatment(facts),
        )
    if attentions:
        return None
    return NotApplicable(reason="neither a configuration nor a profiled GPU step shows the attention")


def on_gpu(facts: Facts) -> Arm | None:
    """Return the step as it is on a GPU: on a CPU, torch's attention takes other backends."""
    if not recorded(facts, "trial.arms"):
        return watched_on_gpu(facts)
    return None if facts.trial.device == "cpu" else arm(facts.trial, ArmName.AS_IS)


def unfused_sentence(plain: PlainAttention) -> str:
    return (
        "In the profiled step, its softmax, batched matmuls and the kernels between them take at least "
        f"{plain.total_ms:,.1f} ms, {percent(plain.share_pct)} of the GPU's time."
    )


def evidence_of(plain: PlainAttention) -> dict[str, Value | tuple[Value, ...]]:
    return {
        "softmax_ms": plain.softmax_ms,
        "batched_gemm_ms": plain.gemm_ms,
        "between_ms": plain.others_ms,
        "share_pct": plain.share_pct,
        "beside_fused": plain.beside_fused,
    }


def why(facts: Facts) -> list[str]:
    """Say why torch's attention falls back, as far as the facts show it."""
    if bias_not_contiguous(facts):
        return [
            f"Before {CONTIGUOUS_BIAS}, transformers passes the position bias as a permuted view. Fused "
            "backends need stride 1 in its last dimension, so torch's attention uses its math backend, in "
            "fp32."
        ]
    if calls_torchs(facts):
        return [
            "The model calls torch's attention. If no fused backend accepts a call, torch uses its math "
            "backend, which computes in fp32."
        ]
    return []


def treatment(facts: Facts) -> Treatment:
    if bias_not_contiguous(facts):
        return UPGRADE_TRANSFORMERS
    return ASK_TORCH if calls_torchs(facts) else CALL_TORCHS


def calls_torchs(facts: Facts) -> bool:
    return any(each.implementation == "sdpa" for each in facts.network.attentions)


def bias_not_contiguous(facts: Facts) -> bool:
    """Whether a T5-like model gets its bias from a transformers that leaves it permuted."""
    packages = facts.packages()
    version = packages["transformers"].version if "transformers" in packages else None
    biased = any(
        each.implementation == "sdpa" and T5_FAMILY.search(each.kind) for each in facts.network.attentions
    )
    return biased and version is not None and Version(version) < Version(CONTIGUOUS_BIAS)


def no_other(attention: Attention) -> str | None:
    """Say why a class has, or may have, only eager attention."""
    if attention.has_sdpa:
        return None
    return (
        "transformers "
        + ("has no other" if attention.has_sdpa is False else "does not say whether it has another")
        + f" for {attention.kind.rpartition('.')[2]}"
    )


def fused(attention: Attention, network: Network) -> Treatment:
    """Write transformers' own switch, on the module that has the configuration."""
    name = f"{attention.name}.set_attn_implementation".lstrip(".")
    return Treatment(
        name="attention-sdpa",
        summary="use torch's fused attention",
        code=f'{in_python(name, network)}("sdpa")   # or attn_implementation="sdpa" in from_pretrained',
    )


SWITCH_ON = Treatment(
    name="fused-attention-on",
    summary="switch torch's fused attention on, and let torch choose",
    code="torch.backends.cuda.enable_flash_sdp(True)\ntorch.backends.cuda.enable_mem_efficient_sdp(True)\ntorch.backends.cuda.enable_cudnn_sdp(True)",
)
UPGRADE_TRANSFORMERS = Treatment(
    name="contiguous-position-bias",
    summary=f"use transformers {CONTIGUOUS_BIAS} or newer, whose position bias fits a fused kernel",
    code=f'pip install "transformers>={CONTIGUOUS_BIAS}"',
)
ASK_TORCH = Treatment(
    name="say-why-not-fused",
    summary="let torch say why no fused backend accepts the call, and fix the argument that it names",
    code="from torch.nn.attention import SDPBackend, sdpa_kernel\n"
    "with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, "
    "SDPBackend.EFFICIENT_ATTENTION]):\n"
    "    loss = compute_loss(model, batch)   # raises if it would fall back, and warns why",
)
CALL_TORCHS = Treatment(
    name="call-fused-attention",
    summary="compute attention with torch's own function, in 16 bits, and with is_causal instead of a "
    "causal mask",
    code="output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)",
)


def _llama(implementation: str) -> Facts:
    kind = "transformers.LlamaForCausalLM"
    attention = Attention(name="", kind=kind, implementation=implementation, has_sdpa=True, needs_eager=None)
    return example(attentions=(attention,), wrappers=(), sdp_backends=(*sorted(FUSED), "math"))


FIRES = _llama("eager")
SILENT = _llama("sdpa")
