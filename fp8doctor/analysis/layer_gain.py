"""Gain of each FP8 layer over BF16, by the cost model's matmuls and compiled casts.

Experts are left out, because their rows change from step to step. A trial times the step without the
layers that lose."""

from collections.abc import Callable, Collection

import msgspec
from msgspec.structs import replace

from fp8doctor.analysis.layers import fits_fp8, flops_share_pct, would_be_converted
from fp8doctor.analysis.recipe_support import unaligned
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.trial_view import fp8_pays
from fp8doctor.cost.layer import is_known, linear_cost, recipe_on
from fp8doctor.cost.matmuls import calls_of, gemms, micro_batches, rows_of, step_tokens
from fp8doctor.cost.step_cost import UNCERTAINTY, with_tokens
from fp8doctor.facts import Facts, Linear, Unrecorded, if_recorded, once, recorded
from fp8doctor.gpus import GpuSpec, modelled_gpu
from fp8doctor.recipes import recipe_of, stack_of

ERROR = 0.09
"""Part of BF16 matmul time by which the cost model is off: the mean over 1490 matmuls on an H200."""

MANY_TOKENS = 65_536
"""Tokens of a micro-batch at which a layer that still loses is called too small. A choice."""

MOST_GROWTH = 16
"""Times its size that a batch may grow to; more asks for another training. A choice."""

WORTH_PCT = 2.0
"""Loss of all body layers that lose / time of the model's matmuls in BF16, in per cent, below which a filter
is not worth it: a step measured against itself repeats within that."""

APART = ("head", "router")
"""Roles of layers whose rounding goes straight into the loss or the routing."""


class Gain(msgspec.Struct, frozen=True):
    """The gain of one layer from FP8, in one micro-batch."""

    bf16_ms: float
    fp8_ms: float
    casts_ms: float
    """As they are in a compiled step."""
    times: int
    """Repetitions in a step: micro-batches, calls of the layer, and matmuls of that shape."""

    @property
    def ms(self) -> float:
        """Compute what FP8 saves of a step; negative if it costs."""
        return self.times * (self.bf16_ms - self.fp8_ms - self.casts_ms)

    def loses(self, by: float = UNCERTAINTY) -> bool:
        """Return whether FP8 is slower by more than this share; by default by more than the model's error."""
        return self.fp8_ms + self.casts_ms > self.bf16_ms * (1 + by)


def gain_of(linear: Linear, facts: Facts, gpu: GpuSpec | None, rows: int | None = None) -> Gain | None:
    """Model one layer's gain; None without numbers."""
    rows = rows or rows_of(linear, facts) or facts.workload.tokens
    cost = linear_cost(linear, rows, gpu) if gpu is not None and rows is not None else None
    if cost is None:
        return None
    times = micro_batches(facts) * gemms(linear) * calls_of(linear, facts)
    return Gain(cost.bf16_ms, cost.fp8_ms, cost.casts_ms, times)


def judged(facts: Facts) -> list[Linear]:
    """List FP8 layers as wide as FP8 kernels need, which multiply every token once."""
    gpu, fp8 = modelled_gpu(facts), facts.network.fp8
    if gpu is not None:
        fp8 = [
            replace(each, recipe=recipe_on(each, gpu)) if stack_of(each).defaults else each for each in fp8
        ]
    known = [each for each in fp8 if is_known(each, gpu) and each.role != "experts" and fits_fp8(each)]
    return [each for each in known if not each.get("features", {}).get("emulate")]


@once
def gains(facts: Facts) -> dict[str, Gain]:
    """Compute every judged layer's gain by name; empty if tokens or GPU forbid it."""
    gpu = modelled_gpu(facts)
    found = ((linear.name, gain_of(linear, facts, gpu)) for linear in judged(facts))
    return {name: gain for name, gain in found if gain is not None}


def speedup(of: Collection[Gain]) -> float:
    """Divide matmuls in BF16 by matmuls and casts in FP8."""
    in_fp8 = sum(gain.times * (gain.fp8_ms + gain.casts_ms) for gain in of)
    return sum(gain.times * gain.bf16_ms for gain in of) / in_fp8


def is_given(facts: Facts) -> bool:
    return recorded(facts, "workload") and facts.workload.batch_source == "given"


def crossing(facts: Facts) -> tuple[int, float, float] | None:
    """Find the tokens from which FP8 pays, with `speedup` now and then; None if no number of them decides.

    That is where it pays now, as a step or by its layers, or does not with `MANY_TOKENS` either, or if the
    batch is not the user's.
    """
    now, tokens = list(gains(facts).values()), step_tokens(facts)
    loses = bool(now) and speedup(now) * (1 + UNCERTAINTY) < 1
    if not loses or not tokens or not is_given(facts) or fp8_pays(facts):
        return None
    pays = first_that_pays(tokens, lambda more: speedup(gains(with_tokens(facts, more)).values()))
    return (pays[0], speedup(now), pays[1]) if pays else None


def first_that_pays(tokens: int, speedup_with: Callable[[int], float]) -> tuple[int, float] | None:
    """Double the tokens of a micro-batch until FP8 pays, and tell the speedup; None up to `MANY_TOKENS`."""
    while (tokens := tokens * 2) <= MANY_TOKENS:
        if (then := speedup_with(tokens)) >= 1 + EVEN:
            return tokens, then
    return None


def would_lose(linear: Linear, facts: Facts, recipe: str | None) -> bool:
    """Return whether a BF16 layer would lose with this recipe, and none is better for it.

    If one check leaves a layer out of the conversion, no other may ask for it.
    """
    gpu, converted = modelled_gpu(facts), replace(linear, use="training", recipe=recipe)
    if not is_known(converted, gpu) or linear.role == "experts" or not fits_fp8(linear):
        return False
    gain = gain_of(converted, facts, gpu)
    return gain is not None and gain.loses() and _too_small(converted, facts)


def _too_small(linear: Linear, facts: Facts) -> bool:
    """Return whether a layer that loses has the wrong shape, not too few tokens or the wrong recipe.

    It does not begin to pay with `MANY_TOKENS` either, or loses with one scale per tensor too.
    """
    gpu, by_row = modelled_gpu(facts), recipe_of(linear).granularity == "row"
    rows = None if by_row and is_given(facts) else MANY_TOKENS
    best = replace(linear, recipe="tensorwise") if by_row else linear
    then = gain_of(best, facts, gpu, rows=rows)
    return then is not None and speedup([then]) < (1 / (1 + ERROR) if by_row else 1 + EVEN)


def losing(facts: Facts, by: float = UNCERTAINTY) -> dict[str, Gain]:
    """Find the layers that are better left in BF16, as `Gain.loses` by so much, in the order of the model.

    LoRA's are left to another rule. Layers of the body are worth a filter only if all of them lose a share of
    the matmuls' time, and if no larger batch is the fix.
    """
    of_all = gains(facts)
    layers = [each for each in judged(facts) if each.name in of_all and of_all[each.name].loses(by)]
    layers = [each for each in layers if each.adapter != "adapter" and _too_small(each, facts)]
    body = [each for each in layers if each.role not in APART]
    if body and not _are_worth_a_filter(body, of_all, facts):
        layers = [each for each in layers if each.role in APART]
    return {each.name: of_all[each.name] for each in layers}


def _are_worth_a_filter(body: list[Linear], of_all: dict[str, Gain], facts: Facts) -> bool:
    if crossing(facts) is not None or (len(body) == len(of_all) and fp8_pays(facts)):
        return False
    layers = judged(facts)
    if not all(recorded(each, "flops_share_pct") for each in layers):
        raise Unrecorded(Linear, "flops_share_pct")
    lost = -sum(of_all[each.name].ms for each in body)
    in_bf16 = sum(gain.times * gain.bf16_ms for gain in of_all.values())
    return lost / in_bf16 * flops_share_pct(layers, facts) >= WORTH_PCT


def to_keep(facts: Facts) -> tuple[str, ...]:
    """Name the layers that a trial tries in BF16: those that lose by the model at all.

    It had the sign of 280 of 307 shapes that trials of 91 jobs timed alone (H100 and H200). A margin of
    `UNCERTAINTY` would hide 48 layers of h200-vit, whose filter saved 3 to 8 of 29 ms.
    """
    return tuple(losing(facts, by=0.0))


def pays_for_none(facts: Facts) -> bool:
    """Return whether BF16 is better for every FP8 layer, and for every layer that could be converted."""
    fp8, lose = facts.network.fp8, losing(facts)
    others = (linear for linear in facts.network.linears if if_recorded(would_be_converted, linear))
    return all(each.name in lose or if_recorded(unaligned, each) for each in fp8) and all(
        would_lose(linear, facts, fp8[0].recipe) for linear in others
    )
