"""A Transformer Engine step that the cost model expects to wait for its host."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.analysis.losing_layers import MANY_TOKENS, PAYS_FROM, is_given
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.cost import step_tokens
from fp8doctor.cost.eager import UNCERTAINTY
from fp8doctor.cost.step_cost import ModelledStep, in_bf16, modelled_step, with_linears_compiled, with_tokens
from fp8doctor.facts import Facts
from fp8doctor.recipes import stack_of


class HostBound(Struct, frozen=True):
    """A modelled step whose launches take longer than its kernels."""

    step: ModelledStep
    speedup: float
    """Time of the best BF16 / time as it is."""
    bf16: ModelledStep
    """The step in compiled BF16."""
    pays_from: int | None
    """Tokens of a micro-batch from which FP8 pays; None if it does with none up to `MANY_TOKENS`."""


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
    return HostBound(step, as_is, bf16, _pays_from(facts))


def _pays_from(facts: Facts) -> int | None:
    """Find the tokens of a micro-batch with which FP8 is modelled as faster than BF16."""
    tokens, times = step_tokens(facts) or 0, 1
    while tokens and tokens * (times := times * 2) <= MANY_TOKENS:
        then = modelled_speedup(with_tokens(facts, tokens * times))
        if then is not None and then.as_is is not None and then.as_is >= PAYS_FROM:
            return tokens * times
    return None
