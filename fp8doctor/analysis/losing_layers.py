"""Layers that FP8 makes slower, and the batch size from which FP8 pays."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from fp8doctor.analysis.layer_gain import (
    Gain,
    gain_of,
    gains,
    judged,
    speedup,
)
from fp8doctor.analysis.layers import fits_fp8, flops_share_pct
from fp8doctor.analysis.outcome import fp8_pays
from fp8doctor.cost import modelled_gpu, rows_of, step_tokens
from fp8doctor.cost.cast_cost import is_known
from fp8doctor.cost.eager import UNCERTAINTY
from fp8doctor.facts import Facts, Linear, Unrecorded, recorded
from fp8doctor.finding import Saving
from fp8doctor.recipes import recipe_of

MANY_TOKENS = 65_536
"""Tokens of a micro-batch at which a layer that still loses is called too small. A choice."""


PAYS_FROM = 1.03
"""Speedup from which FP8 pays; below it is even. The convention of `fp8doctor.analysis.significance.EVEN`."""


MOST_GROWTH = 16
"""Times its size that a batch may grow to; more asks for another training. A choice."""


class Crossing(msgspec.Struct, frozen=True):
    """Tokens of a micro-batch with which FP8 begins to pay."""

    tokens: int
    speedup_now: float
    """BF16 matmuls / (FP8 matmuls + the fewest casts), with the tokens there are."""
    speedup_then: float
    measured: bool
    """True if ``speedup_now`` was timed."""
    gpu: str


def is_given(facts: Facts) -> bool:
    """Return whether the tokens of a step are the user's own."""
    return recorded(facts, "workload") and facts.workload.batch_source == "given"


def crossing(facts: Facts) -> Crossing | None:
    """Find where FP8 begins to pay; None if no number of tokens decides.

    That is where it pays now, as a step or by its layers, or does not with `MANY_TOKENS` either, or if the
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
    """Return whether these layers together lose by more than the margin of any."""
    return bool(of) and speedup(of) * (1 + max(gain.margin for gain in of)) < 1


WORTH_PCT = 2.0
"""Loss of all body layers that lose / time of the model's matmuls in BF16, in per cent, below which a filter
is not worth it: a step measured against itself repeats within that."""


APART = ("head", "router")
"""Roles of layers whose rounding goes straight into the loss or the routing."""


def losing(facts: Facts) -> dict[str, Gain]:
    """Find the layers that lose, whatever their tokens and recipe.

    The tokens of a synthetic batch are no fault of the model: there a layer has to lose with many tokens too.
    What loses rowwise and not tensorwise has the wrong recipe, not the wrong shape.
    """
    return _losing(gains(facts), facts)


def _losing(found: dict[str, Gain], facts: Facts) -> dict[str, Gain]:
    """Pick those of all gains that are losses, as `losing` says."""
    rows = None if is_given(facts) else MANY_TOKENS
    layers = {linear.name: linear for linear in judged(facts)}
    return {
        name: gain for name, gain in found.items() if gain.loses and _loses_at_best(layers[name], facts, rows)
    }


def would_lose(linear: Linear, facts: Facts, recipe: str | None) -> bool:
    """Return whether a BF16 layer would lose, as `losing` says, with this recipe.

    If one check leaves a layer out of the conversion, no other may ask for it.
    """
    converted = msgspec.structs.replace(linear, use="training", recipe=recipe)
    if not is_known(converted, modelled_gpu(facts)) or linear.role == "experts" or not fits_fp8(linear):
        return False
    gain = gain_of(converted, facts, modelled_gpu(facts))
    rows = None if is_given(facts) else MANY_TOKENS
    return gain is not None and gain.loses and _loses_at_best(converted, facts, rows)


def _loses_at_best(linear: Linear, facts: Facts, rows: int | None) -> bool:
    """Return whether it loses by the model, scaled by tensors, with these rows."""
    if recipe_of(linear).granularity != "row" and rows is None:
        return True
    best = _at_best(linear, facts, rows)
    return best is not None and best.loses


def _at_best(linear: Linear, facts: Facts, rows: int | None) -> Gain | None:
    """Model the gain with so many rows, scaled by tensors."""
    return gain_of(
        msgspec.structs.replace(linear, recipe="tensorwise")
        if recipe_of(linear).granularity == "row"
        else linear,
        facts,
        modelled_gpu(facts),
        rows=rows,
    )


def _has_too_few_tokens(linear: Linear, facts: Facts) -> bool:
    """Return whether it wins with `MANY_TOKENS` by the model, but not with its rows."""
    now, then = _at_best(linear, facts, None), _at_best(linear, facts, MANY_TOKENS)
    return now is not None and then is not None and now.ms <= 0 < then.ms


def losing_apart(facts: Facts) -> dict[str, Gain]:
    """Find heads and routers that lose with many tokens too."""
    apart = {linear.name: linear for linear in judged(facts) if linear.role in APART}
    return {
        name: gain
        for name, gain in losing(facts).items()
        if name in apart and _loses_at_best(apart[name], facts, MANY_TOKENS)
    }


def losing_body(facts: Facts) -> dict[str, Gain]:
    """Find layers of the body whose loss is worth a filter and stays with more tokens.

    LoRA's are left out. If all layers together lose for sure, and do with any number of tokens, those that
    more tokens would help lose too. Timed ones are left to the whole step, which was timed in BF16 as well.
    """
    body = {
        linear.name: linear
        for linear in judged(facts)
        if linear.role not in APART and linear.adapter != "adapter"
    }
    of_all = gains(facts)
    if crossing_of(list(of_all.values()), facts) is not None:
        return {}
    timed = any(gain.measured for gain in of_all.values())
    lost = not timed and is_given(facts) and lose_for_sure(of_all.values())
    found = {
        name: gain
        for name, gain in _losing(of_all, facts).items()
        if name in body and (lost or not _has_too_few_tokens(body[name], facts))
    }
    if not found or (len(found) == len(of_all) and fp8_pays(facts)):
        return {}
    worth = loss_pct(found.values(), of_all.values(), facts) >= WORTH_PCT
    return found if worth else {}


def loss_pct(of: Iterable[Gain], of_all: Iterable[Gain], facts: Facts) -> float:
    """Divide these layers' least loss by all BF16 matmuls of the model, in per cent."""
    in_bf16 = sum(gain.times * gain.bf16_ms for gain in of_all)
    layers = judged(facts)
    if not all(recorded(each, "flops_share_pct") for each in layers):
        raise Unrecorded(Linear, "flops_share_pct")
    share_pct = flops_share_pct(layers, facts)
    return -sum(gain.most_ms for gain in of) / in_bf16 * share_pct


def to_keep(facts: Facts) -> tuple[str, ...]:
    """Name the layers that are better left in BF16, in the order of the model."""
    found = losing_apart(facts) | losing_body(facts)
    return tuple(linear.name for linear in judged(facts) if linear.name in found)


def acquitted(of: Iterable[Gain], saved: Saving | None) -> bool:
    """Return whether the step ``saved`` less than expected without these FP8 layers."""
    return saved is not None and 0 < saved.high < -sum(gain.most_ms for gain in of)


def in_step(saved: Saving | None) -> str:
    """Write the whole step's result as a sentence to add; empty if it was not timed."""
    if saved is None:
        return ""
    low, high = (f"{ms:.2f}".replace("-", "−") for ms in (saved.low, saved.high))
    return f" The whole step was timed without them in FP8: that saves {low} to {high} ms."


def saving(of: Iterable[Gain]) -> Saving:
    """Tell what BF16 saves of a step for layers that lose.

    It is modelled even if each layer was timed, because each was timed alone.
    """
    of = list(of)
    low, high = -sum(gain.most_ms for gain in of), -sum(gain.ms for gain in of)
    apart = 0.0 if all(gain.measured for gain in of) else UNCERTAINTY
    return Saving(low=low * (1 - apart), high=high * (1 + apart), basis="modelled", gpu=of[0].gpu)
