"""Say what a file of FP8's health means: which layers lose what, since when, and what to change.

Pure functions of `Health`. A fault counts if `LASTING` samples of a layer's tensor in a row show it. Limits
come from healthy runs (see each). A loss that rises is FP8's doing only if a fault came before the rise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.health.record import CastHealth, FirstBad, Health, HealthLayer
from fp8doctor.recipes import TORCHAO, TRANSFORMER_ENGINE
from fp8doctor.wording import percent, plural

LASTING = 2
"""Samples in a row that show a fault. One alone may be an odd batch."""

SATURATED_PCT = 1.0
"""Percent of elements beyond the largest FP8 number. Healthy runs on an H100 had at most 0.005."""

FLUSHED_PCT = 25.0
"""Percent of elements that became zero. Healthy runs on an H100 had at most 9.5 (inputs after a GELU) and 6.5
(gradients), which cost nothing: see `LEAST_DB`."""

NAMED_PCT = 1.0
"""Least share of zeros that is named as the reason."""

LEAST_DB = {"input": 20.0, "weight": 20.0, "gradient": 17.0}
"""Least ratio of signal to rounding error. Healthy runs on an H100 had at least 30, 30 and 24."""

LEAST_TYPICAL_DB = {"input": 15.0, "weight": 15.0, "gradient": 12.0}
"""The same for a row in the middle: one element may hold all of a tensor's power."""

COARSE = {"input": 1 / 64, "weight": 1 / 64, "gradient": 1 / 1024}
"""Least use of a delayed scale's range. Healthy runs on an H100 (history of 1,024 steps) used at least 0.60,
0.93 and 0.012: gradients shrink early in a training."""

STALE = 4.0
"""Use of a scale's range from which saturation is the scale's fault. Healthy runs on an H100: at most 3.0."""

ALIKE = 4.0
"""Largest ratio of a scale's use to that of the history it should come from."""

TREND = 1.25
"""Ratio of the later half of a fault's samples to the earlier one that is called a trend."""

RISE = 5.0
"""Rise of the loss, in typical differences between two samples, that is called a divergence."""

RISE_SHARE = 0.05
"""Least rise of the loss, as a share of the lowest."""

NAMED = 3
"""Layers of one fault that a sentence names."""

Kind = Literal["non_finite", "stale_scale", "poisoned_history", "saturated", "flushed", "imprecise"]
ORDER: tuple[Kind, ...] = (
    "non_finite",
    "stale_scale",
    "poisoned_history",
    "saturated",
    "flushed",
    "imprecise",
)


class Fault(msgspec.Struct, frozen=True):
    """One tensor of one layer that loses something."""

    kind: Kind
    layer: str
    operand: str
    since: int
    last: int
    restarted: bool
    """It began with the first sample after a restart."""
    lasts: bool
    """The newest sample shows it."""
    amount: float | None
    """In the last of these samples: percent of elements, dB, or the ratio of a scale's use."""
    trend: str
    """``rising``, ``falling`` or empty."""


class Rise(msgspec.Struct, frozen=True):
    """A loss that rises and stays up."""

    since: int
    lowest: float
    last: float | None
    gradient_norms: tuple[float | None, float | None]
    """At the lowest loss and in the last sample."""
    by_fp8: bool
    """A fault of a layer began before it."""


class Conclusion(msgspec.Struct, frozen=True):
    """A fault of one or several layers, in words."""

    text: str
    code: str
    faults: tuple[Fault, ...] = ()


class HealthVerdict(msgspec.Struct, frozen=True):
    """All that a file says."""

    status: Literal["healthy", "faults", "diverges", "not_finite", "unknown"]
    summary: str
    conclusions: tuple[Conclusion, ...]
    rise: Rise | None
    first_bad: tuple[FirstBad, ...]

    @property
    def layers(self) -> set[str]:
        """Names of the layers with a fault."""
        return {fault.layer for each in self.conclusions for fault in each.faults}


def conclude(health: Health) -> HealthVerdict:
    """Judge a run."""
    found = sorted(faults(health), key=lambda each: (ORDER.index(each.kind), -(each.amount or 0.0)))
    rise = rise_of(health, found)
    caused = [each for each in found if rise is None or each.since < rise.since]
    conclusions = tuple(_concluded(caused, health))
    if health.first_bad:
        status, summary = "not_finite", health.first_bad[0].sentence
    elif rise is not None and not caused:
        status, summary = "diverges", _of_rise(rise)
    elif conclusions:
        status = "faults"
        layers = len({each.layer for each in caused})
        summary = f"FP8 loses too much in {plural(layers, 'layer')} of {len(health.layers)}."
        summary += f" {_of_rise(rise)}" if rise is not None else ""
    elif len(health.samples) < LASTING:
        status, summary = "unknown", f"Only {plural(len(health.samples), 'step')} sampled: too few to judge."
    elif not health.layers:
        status, summary = (
            "unknown",
            "No layer of the job trains in FP8: only loss and gradients were sampled.",
        )
    else:
        status, summary = "healthy", _of_healthy(health)
    return HealthVerdict(status, summary, conclusions, rise, health.first_bad)  # type: ignore[arg-type]


def faults(health: Health) -> Iterator[Fault]:
    """Find what lasted, in each layer's tensors; the longest of each kind."""
    restarts = {
        next((sample.step for head, sample in health.samples if head is header), None)
        for header in health.headers[1:]
    }
    newest = health.steps[-1] if health.steps else 0
    for (layer, operand), series in health.series().items():
        found: dict[Kind, list[tuple[int, CastHealth]]] = {}
        stretch: list[tuple[int, CastHealth]] = []
        kind: Kind | None = None
        for step, cast in [*series, (0, CastHealth())]:
            now = kind_of(cast, operand)
            if now is None or (kind is not None and now != kind):
                lasted = len(stretch) >= (1 if kind == "non_finite" else LASTING)
                if kind is not None and lasted and len(stretch) >= len(found.get(kind, ())):
                    found[kind] = stretch
                if kind is not None and lasted and stretch[-1][0] == newest:
                    found[kind] = stretch
                stretch = []
            kind = now
            if now is not None:
                stretch = [*stretch, (step, cast)]
        for kind_found, steps in found.items():
            yield Fault(
                kind_found,
                layer,
                operand,
                since=steps[0][0],
                last=steps[-1][0],
                restarted=steps[0][0] in restarts,
                lasts=steps[-1][0] == newest,
                amount=_amount(kind_found, steps[-1][1]),
                trend=_trend([_amount(kind_found, cast) for _, cast in steps]),
            )


def kind_of(cast: CastHealth, operand: str) -> Kind | None:
    """Return the fault that one sample of a cast shows."""
    if cast.non_finite:
        return "non_finite"
    flushed = cast.flushed_pct or 0.0
    lost = (
        flushed >= FLUSHED_PCT
        or (flushed > 0 if cast.sqnr_db is None else cast.sqnr_db < LEAST_DB[operand])
        or (cast.typical_db is not None and cast.typical_db < LEAST_TYPICAL_DB[operand])
    )
    if cast.used is not None and cast.used < COARSE[operand] and (lost or cast.of_history is not None):
        agrees = cast.of_history is not None and 1 / ALIKE < cast.used / cast.of_history < ALIKE
        return "poisoned_history" if agrees else "stale_scale"
    if (cast.saturated_pct or 0.0) >= SATURATED_PCT:
        return "saturated" if cast.used is None or cast.used < STALE else "stale_scale"
    if not lost:
        return None
    return "flushed" if flushed >= NAMED_PCT else "imprecise"


def _amount(kind: Kind, cast: CastHealth) -> float | None:
    if kind == "non_finite":
        return cast.non_finite
    if kind in ("stale_scale", "poisoned_history"):
        return cast.used
    lowest = min((db for db in (cast.sqnr_db, cast.typical_db) if db is not None), default=None)
    return {"saturated": cast.saturated_pct, "flushed": cast.flushed_pct}.get(kind, lowest)


def _trend(amounts: Sequence[float | None]) -> str:
    known = [each for each in amounts if each is not None]
    half = len(known) // 2
    if not half:
        return ""
    early, late = statistics.fmean(known[:half]), statistics.fmean(known[-half:])
    return "rising" if late > TREND * early else "falling" if late * TREND < early else ""


def rise_of(health: Health, found: Iterable[Fault]) -> Rise | None:
    """Find a loss that rose for good, and whether FP8 was at fault before."""
    points = [sample for _, sample in health.samples if sample.loss is not None]
    losses = [each.loss or 0.0 for each in points]
    smooth = [statistics.median(losses[max(0, at - 2) : at + 1]) for at in range(len(losses))]
    lowest = min(range(len(smooth)), key=smooth.__getitem__, default=0)
    noise = statistics.median([abs(two - one) for one, two in pairwise(losses[: lowest + 1])] or [0.0])
    limit = smooth[lowest] + max(RISE * noise, RISE_SHARE * abs(smooth[lowest]))
    high = [at for at in range(lowest + 1, len(points)) if losses[at] > limit]
    if not lowest or len(points) <= LASTING or high[-LASTING - 1 :] != [*range(len(points))][-LASTING - 1 :]:
        return None
    since = next(at for at in high if sum(each >= at for each in high) >= (len(points) - at) / 2)
    return Rise(
        since=points[since].step,
        lowest=smooth[lowest],
        last=points[-1].loss,
        gradient_norms=(points[lowest].gradient_norm, points[-1].gradient_norm),
        by_fp8=any(each.since < points[since].step for each in found),
    )


def _of_rise(rise: Rise) -> str:
    low, now = rise.gradient_norms
    norm = f", the gradient norm from {low:.3g} to {now:.3g}" if low is not None and now is not None else ""
    rose = f"The loss rises since step {rise.since:,}: from {rise.lowest:.4g} to {rise.last:.4g}{norm}."
    if rise.by_fp8:
        return f"{rose} FP8 lost precision before that."
    return (
        f"{rose} FP8 did not start it: no layer lost more than before. Lower the learning rate or warm it up "
        "longer, and look at the data."
    )


def _of_healthy(health: Health) -> str:
    steps = health.steps
    casts = [cast for series in health.series().values() for _, cast in series]
    db = [cast.sqnr_db for cast in casts if cast.sqnr_db is not None]
    flushed = max((cast.flushed_pct or 0.0 for cast in casts), default=0.0)
    low = f" Signal to rounding error: {min(db):.0f} dB or more." if db else ""
    whole = f"FP8 is healthy in {plural(len(health.layers), 'layer')}, steps {steps[0]:,} to {steps[-1]:,}."
    return f"{whole}{low} At most {percent(flushed)} of a tensor became zero."


def _concluded(found: Sequence[Fault], health: Health) -> Iterator[Conclusion]:
    """Group faults that need one change, and say them."""
    groups: dict[tuple[Kind, str, bool], list[Fault]] = {}
    for fault in found:
        groups.setdefault((fault.kind, fault.operand, fault.lasts), []).append(fault)
    for (kind, _, lasts), members in groups.items():
        layers = [health.layers[each.layer] for each in members]
        advice, code = _advice(kind, layers) if lasts else ("It has ended.", "")
        yield Conclusion(f"{_sentence(members)} {advice}".strip(), code, tuple(members))


def _sentence(members: Sequence[Fault]) -> str:
    first = members[0]
    names = ", ".join(each.layer for each in members[:NAMED])
    more = f" and {len(members) - NAMED} more" if len(members) > NAMED else ""
    since = min(each.since for each in members)
    when = f"since the restart, step {since:,}" if first.restarted else f"since step {since:,}"
    if not first.lasts:
        when = f"from step {since:,} to {max(each.last for each in members):,}"
    trend = f", {first.trend}" if first.trend and first.kind in ("saturated", "flushed") else ""
    its = f"{'its' if len(members) == 1 else 'their'} {first.operand}"
    amount = first.amount or 0.0
    what = {
        "non_finite": f"{its} has {amount:,.0f} elements that are not finite {when}",
        "saturated": f"{percent(amount)} of {its} is too large for FP8 {when}{trend}",
        "flushed": f"{percent(amount)} of {its} has flushed to zero {when}{trend}",
        "imprecise": f"{its} is only {amount:.0f} dB above its rounding error {when}",
        "poisoned_history": f"{its} uses {_part(amount)} of the scale's range {when}: its amax history "
        f"{'came with a checkpoint and' if first.restarted else 'still'} holds a value "
        f"{1 / amount if amount else 0:,.0f} times as large",
        "stale_scale": f"the scale of {its} is stale {when}: the largest element is {_part(amount)} of what "
        "the scale can hold",
    }[first.kind]
    return f"{names}{more}: {what}."


def _part(ratio: float) -> str:
    return percent(100 * ratio) if ratio < 1 else f"{ratio:,.1f} times"


def _advice(kind: Kind, layers: Sequence[HealthLayer]) -> tuple[str, str]:
    """Return what to do, and the lines."""
    stacks = {layer.stack for layer in layers}
    if kind in ("poisoned_history", "stale_scale") and stacks == {TRANSFORMER_ENGINE.name}:
        code = (
            "from transformer_engine.common.recipe import Float8CurrentScaling\n"
            "with te.autocast(enabled=True, recipe=Float8CurrentScaling()):   # scales by the tensor itself\n"
            "    output = model(batch)"
        )
        if kind == "poisoned_history":
            return "Scale by the tensor itself, or keep a shorter history (amax_history_len=16):", code
        return "Load the scales with the weights (_extra_state), or scale by the tensor itself:", code
    if kind in ("poisoned_history", "stale_scale"):
        return "Reset the scale and its history when the weights are loaded.", ""
    names = [layer.name for layer in layers]
    if stacks == {TORCHAO.name}:
        rows = {layer.recipe for layer in layers} == {"tensorwise"}
        note = '\n# or one scale per row: Float8LinearConfig.from_recipe_name("rowwise")' if rows else ""
        return f"Keep {'it' if len(names) == 1 else 'them'} in BF16:", keep_in_bf16(names).code + note
    return f"Keep {'it' if len(names) == 1 else 'them'} in BF16 (build as torch.nn.Linear).", ""
