"""Attention runs as plain GEMMs and a softmax

Looks at: the attention that transformers' configurations ask for (`attn_implementation`), the
backends that this process lets torch's `scaled_dot_product_attention` use, and, where a step was
profiled, the kernels that attention really ran.

Why it costs time. A fused kernel (flash, cuDNN, memory-efficient) never writes the scores to
memory. Eager attention and torch's math backend do: heads x tokens x tokens of them, several passes
over each, forward and backward, growing with the square of the sequence. FP8 makes the Linears
faster and leaves this as it is, so its share grows. It helps BF16 as much.

What to do. Let torch choose; it takes the fastest backend that fits each call.

    AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")   # before
    AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")    # after
    torch.backends.cuda.enable_flash_sdp(False)                               # before
    torch.backends.cuda.enable_flash_sdp(True)                                # after

Eager attention that something needs is left alone: `output_attentions=True`, capped logits (Gemma
2), or a class for which transformers has no other. Which backend a call takes depends on its mask,
head size and dtype, which only a profiled step shows; an fp32 step is MEM003's.

Evidence: with transformers 5.23, run on a CPU, the configuration decides in every call.
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8doctor.facts import Attention, Facts, KernelGroup, Network, Training, recorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.measured import arm
from fp8doctor.overview import in_python, percent
from fp8doctor.record import Value
from fp8doctor.registry import check

FUSED = frozenset(("flash", "mem_efficient", "cudnn"))
"""Backends of torch that never write the scores to memory. Source: ``torch.nn.attention.SDPBackend``, torch 2.13."""

SHARE_PCT = 10.0
"""Share of a step, in per cent, that softmax and batched GEMMs have to take before their kernels alone are called attention.
A choice: a router's softmax and the small batched GEMMs of other layers stay far below."""

SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data", "aten::_safe_softmax")
BATCHED_GEMM = ("aten::bmm", "aten::baddbmm")
"""Operators that launch the kernels of eager attention and of the math backend. The loss's softmax is ``aten::_log_softmax``."""


@check("MEM004", "slow-attention-backend", area="memory", severity="warning", needs=("network.attentions", "training.sdp_backends"))
def slow_attention_backend(facts: Facts) -> Finding | NotApplicable | None:
    attentions, backends = facts.network.attentions, facts.training.sdp_backends
    eager = [each for each in attentions if each.implementation == "eager" and each.has_sdpa and each.needs_eager is None]
    unfused = plain_kernels(facts)
    seen = f" {unfused.sentence}" if unfused else ""
    evidence: dict[str, Value | tuple[Value, ...]] = {"sdp_backends": backends, **(unfused.evidence if unfused else {})}
    if eager:
        names = ", ".join(dict.fromkeys(each.kind.rpartition(".")[2] for each in eager))
        return Finding(
            title=f"Attention is eager in {names}",
            explanation=f"The configuration asks for it; transformers has torch's fused attention for this class, and nothing needs eager.{seen}",
            evidence={"eager": tuple(each.name or "the model" for each in eager), **evidence},
            treatment=fused(eager[0], facts.network),
        )
    torchs = [each for each in attentions if each.implementation == "sdpa"]
    if torchs and FUSED.isdisjoint(backends):
        return Finding(
            title="Every fused backend of torch's attention is switched off",
            explanation=f"What is left to scaled_dot_product_attention is {' and '.join(backends) or 'nothing'}.{seen}",
            evidence={"first": torchs[0].name or "the model", **evidence},
            treatment=SWITCH_ON,
        )
    needed = [reason for each in attentions if each.implementation == "eager" if (reason := each.needs_eager or no_other(each))]
    if needed:
        return NotApplicable(reason=f"attention is eager, and has to be: {needed[0]}")
    if unfused:
        return Finding(
            title=f"Attention runs as batched GEMMs and a softmax: {percent(unfused.share_pct)} of the step",
            explanation=f"{unfused.sentence} No fused attention ran.",
            evidence=evidence,
            treatment=CALL_TORCHS,
        )
    if attentions:
        return None
    return NotApplicable(reason="nothing tells how attention is computed, and no profiled step shows it")


@dataclass(frozen=True)
class Plain:
    """Attention as it was profiled in one step of the deepest cut, without a fused kernel."""

    softmax_ms: float
    gemm_ms: float
    share_pct: float

    @property
    def sentence(self) -> str:
        return f"Profiled, its softmax and batched GEMMs take {percent(self.share_pct)} of the step."

    @property
    def evidence(self) -> dict[str, float]:
        return {"softmax_ms": self.softmax_ms, "batched_gemm_ms": self.gemm_ms, "share_pct": self.share_pct}


def plain_kernels(facts: Facts) -> Plain | None:
    """What the step as it is spends on softmax and batched GEMMs, if no fused attention ran and it is `SHARE_PCT` or more."""
    now = arm(facts.trial, "as_is") if recorded(facts.trial) and recorded(facts.trial.arms) else None
    breakdown = now.breakdown if now and recorded(now.breakdown) else None
    if now is None or breakdown is None or not breakdown.reliable or breakdown.families_ms.get("attention") or not recorded(now.cuts):
        return None
    step_ms = now.cuts[-1].step_ms
    softmax_ms = sum(group.time_ms for group in breakdown.groups if is_softmax(group))
    gemm_ms = sum(group.time_ms for group in breakdown.groups if group.operator in BATCHED_GEMM)
    if not step_ms or not softmax_ms or not gemm_ms:
        return None
    share_pct = 100 * (softmax_ms + gemm_ms) / step_ms
    return Plain(softmax_ms, gemm_ms, share_pct) if share_pct >= SHARE_PCT else None


def is_softmax(group: KernelGroup) -> bool:
    """Whether these kernels are a softmax: by their operator, or by the name that the compiler gives them."""
    compiled = group.name.startswith("triton_") and "_softmax" in group.name.replace("log_softmax", "")
    return group.operator in SOFTMAX or compiled


def no_other(attention: Attention) -> str | None:
    """Why a class has no other attention than eager, or may have none."""
    if attention.has_sdpa:
        return None
    return f"transformers {'has no other' if attention.has_sdpa is False else 'does not say whether it has another'} for {attention.kind.rpartition('.')[2]}"


def fused(attention: Attention, network: Network) -> Treatment:
    """transformers' own switch, on the module that has the configuration."""
    name = f"{attention.name}.set_attn_implementation".lstrip(".")
    return Treatment(
        name="attention-sdpa",
        summary="take torch's fused attention",
        code=f'{in_python(name, network)}("sdpa")   # or attn_implementation="sdpa" where the model is built',
    )


SWITCH_ON = Treatment(
    name="fused-attention-on",
    summary="leave torch's fused attention on, and let torch choose",
    code="torch.backends.cuda.enable_flash_sdp(True)\ntorch.backends.cuda.enable_mem_efficient_sdp(True)\ntorch.backends.cuda.enable_cudnn_sdp(True)",
)
CALL_TORCHS = Treatment(
    name="call-fused-attention",
    summary="compute attention with torch's own function, in 16 bits and with is_causal instead of a mask where that is all it says",
    code="output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)",
)


def _llama(implementation: str) -> Facts:
    attention = Attention(name="", kind="transformers.LlamaForCausalLM", implementation=implementation, has_sdpa=True, needs_eager=None)
    training = Training(sdp_backends=("flash", "mem_efficient", "cudnn", "math"))
    return Facts(network=Network(attentions=(attention,), wrappers=()), training=training)


SICK = _llama("eager")
HEALTHY = _llama("sdpa")
