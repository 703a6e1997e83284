"""From how many tokens of a micro-batch on FP8 pays."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from fp8doctor.analysis.layer_gain import Gain, gain_of, gains, judged, speedup
from fp8doctor.analysis.outcome import fp8_pays
from fp8doctor.cost import modelled_gpu, rows_of, step_tokens
from fp8doctor.facts import Facts, recorded

MANY_TOKENS = 65_536
"""Tokens of a micro-batch at which a layer that still loses is called too small. A choice."""


PAYS_FROM = 1.03
"""Speedup from which FP8 pays; below it is even. The convention of `fp8doctor.analysis.even.EVEN`."""


MOST_GROWTH = 16
"""Times its size that a batch is told to grow to; more asks for another training. A choice."""


class Crossing(msgspec.Struct, frozen=True):
    """Tokens of a micro-batch with which FP8 begins to pay."""

    tokens: int
    speedup_now: float
    """BF16 GEMMs / (FP8 GEMMs + the fewest casts), with the tokens there are."""
    speedup_then: float
    measured: bool
    """Whether ``speedup_now`` rests on what was timed."""
    gpu: str


def is_given(facts: Facts) -> bool:
    """Whether the tokens of a step are the user's own."""
    return recorded(facts, "workload") and facts.workload.batch_source == "given"


def crossing(facts: Facts) -> Crossing | None:
    """Find where FP8 begins to pay; None where no number of tokens decides.

    That is where it pays now, as a step or by its layers, or does not with `MANY_TOKENS` either, or where the
    batch is not the user's.
    """
    return crossing_of(list(gains(facts).values()), facts)


def crossing_of(now: list[Gain], facts: Facts) -> Crossing | None:
    """Find where FP8 begins to pay, with the gains ``now``."""
    tokens = step_tokens(facts)
    if not now or not tokens or not is_given(facts) or fp8_pays(facts) or not lose_for_sure(now):
        return None
    more, gpu = tokens, modelled_gpu(facts)
    layers = [(linear, rows_of(linear, facts)) for linear in judged(facts)]
    while (more := more * 2) <= MANY_TOKENS:
        then = [
            gain
            for linear, rows in layers
            if rows and (gain := gain_of(linear, facts, gpu, rows=rows * more // tokens))
        ]
        if then and speedup(then) >= PAYS_FROM:
            return Crossing(more, speedup(now), speedup(then), all(gain.measured for gain in now), now[0].gpu)
    return None


def lose_for_sure(of: Collection[Gain]) -> bool:
    """Whether these layers together lose by more than the margin of any."""
    return bool(of) and speedup(of) * (1 + max(gain.margin for gain in of)) < 1
