"""A Transformer Engine step that the cost model expects to wait for its host."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.analysis.layer_gain import MANY_TOKENS, MOST_GROWTH, PAYS_FROM, is_given
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.treatment_table import MORE_TOKENS
from fp8doctor.cost import micro_batches, step_tokens
from fp8doctor.cost.eager import UNCERTAINTY
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled, with_tokens
from fp8doctor.facts import Facts, Value
from fp8doctor.finding import Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.wording import plural


class HostBound(Struct, frozen=True):
    """A modelled step whose launches take longer than its kernels, in words."""

    title: str
    explanation: str
    evidence: dict[str, Value | tuple[Value, ...]]
    pays_from: int | None
    """Tokens of a micro-batch from which FP8 pays; None if it does with none up to `MANY_TOKENS`."""
    more_tokens: Treatment | None
    """The batch with which FP8 pays; None if that is too many times today's."""


def modelled_host_bound(facts: Facts) -> HostBound | None:
    """Describe a Transformer Engine step that is slower than BF16 because of its host.

    None if it is not, by more than the model's error, or if the batch is not the user's.
    """
    fp8 = facts.network.fp8
    if not fp8 or not all(stack_of(linear).own_kernels for linear in fp8) or not is_given(facts):
        return None
    step, speedup = modelled_step(facts), modelled_speedup(facts)
    bf16 = modelled_step(with_linears_compiled(in_bf16(facts), yes=True))
    if step is None or speedup is None or bf16 is None:
        return None
    as_is = speedup.as_is
    if as_is is None or step.host_ms < step.busy_ms * (1 + UNCERTAINTY) or as_is * (1 + UNCERTAINTY) > 1:
        return None
    tokens, samples, pays = facts.workload.tokens or 1, facts.workload.batch_size or 1, _pays_from(facts)
    layers = plural(len(fp8), f"{stack_of(fp8[0]).in_words} layer")
    then = (
        f"FP8 pays off from about {pays:,} tokens per micro-batch."
        if pays
        else f"Up to {MANY_TOKENS:,} tokens, FP8 is not faster here."
    )
    return HostBound(
        title=f"The host needs {step.host_ms:,.1f} ms to launch {layers}, a step in compiled BF16 takes "
        f"{bf16.step_ms:,.1f} ms (estimated)",
        explanation=f"This is for {tokens:,} tokens on {step.gpu}. In FP8 the GPU would compute for "
        f"{step.busy_ms:,.1f} ms/step. {then}",
        evidence={
            "host_ms": step.host_ms,
            "busy_ms": step.busy_ms,
            "bf16_step_ms": bf16.step_ms,
            "speedup": round(as_is, 2),
            "tokens": tokens,
            "pays_from_tokens": pays,
            "fp8_layers": len(fp8),
        },
        pays_from=pays,
        more_tokens=Treatment(
            name=MORE_TOKENS,
            summary=f"put {pays:,} tokens into a micro-batch, and accumulate over fewer",
            code=f"batch_size = {samples * pays // tokens}   # from {samples}, or longer sequences: "
            f"{pays:,} tokens",
        )
        if pays and pays <= MOST_GROWTH * tokens * micro_batches(facts)
        else None,
    )


def _pays_from(facts: Facts) -> int | None:
    """Find the tokens of a micro-batch with which FP8 is modelled as faster than BF16."""
    tokens, times = step_tokens(facts) or 0, 1
    while tokens and tokens * (times := times * 2) <= MANY_TOKENS:
        then = modelled_speedup(with_tokens(facts, tokens * times))
        if then is not None and then.as_is is not None and then.as_is >= PAYS_FROM:
            return tokens * times
    return None
