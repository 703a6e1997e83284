"""Say what a file of FP8's health means: which layers lose what, since when, and what to change.

Pure functions of `Health`. A fault counts if `LASTING` samples of a layer's tensor in a row show it. Limits
keep a distance to healthy runs of small GPTs on an H100, recorded in ``tests/health/recorded``.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal

import msgspec

from fp8doctor.analysis.conversion import keep_in_bf16
from fp8doctor.health.record import CastHealth, FirstBad, Health
from fp8doctor.recipes import TORCHAO
from fp8doctor.wording import percent, plural

LASTING = 2
"""Samples in a row that show a fault. One alone may be an odd batch."""

LEAST_DB = {"input": 20.0, "weight": 20.0, "gradient": 17.0}
"""Least ratio of signal to rounding error of a tensor, and of its row in the middle. Healthy: at least 30, 30
and 24. A share of zeros alone is no fault: healthy gradients had up to 33%."""

SATURATED_PCT = 1.0
"""Percent of elements beyond the largest FP8 number. Healthy: at most 0.005."""

COARSE = {"input": 1 / 64, "weight": 1 / 64, "gradient": 1 / 1024}
"""Least use of a delayed scale's range. Healthy, with a history of 1,024 steps: 0.60, 0.93 and 0.011 or more.
Gradients shrink in a training."""

ALIKE = 4.0
"""Largest ratio of a scale's use to that of the history it should come from. A choice."""

NAMED_PCT = 1.0
"""Least share of zeros that is named as the reason. A choice."""

RISE, RISE_SHARE = 5.0, 0.05
"""Least rise of the loss, in typical differences of samples, and as a share of the lowest. A choice."""

NAMED = 3
"""Layers of one fault that a sentence names."""

Kind = Literal["non_finite", "poisoned_history", "saturated", "flushed", "imprecise"]
Status = Literal["healthy", "faults", "diverges", "not_finite", "unknown"]


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
    amount: float
    """In the last of these samples: percent of elements, dB, or the use of a scale's range."""


class Rise(msgspec.Struct, frozen=True):
    """A loss that rises since a step and stays up."""

    since: int
    lowest: float
    last: float


class Conclusion(msgspec.Struct, frozen=True):
    text: str
    code: str
    faults: tuple[Fault, ...]


class HealthVerdict(msgspec.Struct, frozen=True):
    status: Status
    summary: str
    conclusions: tuple[Conclusion, ...]
    rise: Rise | None
    first_bad: tuple[FirstBad, ...]

    @property
    def layers(self) -> set[str]:
        return {fault.layer for each in self.conclusions for fault in each.faults}


def conclude(health: Health) -> HealthVerdict:
    """Judge a run. Faults that began after the loss rose are said to follow from it."""
    rise, everything = rise_of(health), list(faults(health))
    found = [each for each in everything if rise is None or each.since <= rise.since]
    later = [each for each in everything if rise is not None and each.since > rise.since]
    conclusions = (*_concluded(found, health), *_concluded(later, health, after=True))
    said: dict[Status, str] = {}
    if health.first_bad:
        said["not_finite"] = health.first_bad[0].sentence
    if found:
        layers = plural(len({each.layer for each in found}), "layer")
        said["faults"] = f"FP8 loses too much in {layers} of {len(health.layers)}."
    if rise is not None:
        said["diverges"] = _of_rise(rise, found, health)
    said = said or _of_healthy(health)
    return HealthVerdict(next(iter(said)), " ".join(said.values()), conclusions, rise, health.first_bad)


def faults(health: Health) -> Iterator[Fault]:
    """Find what lasted in each layer's tensors: of each kind the last stretch."""
    first = {id(header): sample.step for header, sample in reversed(health.samples)}
    restarts = {first.get(id(header)) for header in health.headers[1:]}
    for (layer, operand), series in health.series().items():
        stretches: dict[Kind, tuple[int, int]] = {}
        shown = [fault_of(cast, operand) for _, cast in series]
        begin = 0
        for kind, alike in groupby(each[0] if each else None for each in shown):
            end = begin + len(list(alike))
            if kind is not None and end - begin >= (1 if kind == "non_finite" else LASTING):
                stretches[kind] = begin, end - 1
            begin = end
        for kind, (begin, end) in stretches.items():
            since, last, amount = series[begin][0], series[end][0], shown[end]
            ends = since in restarts, last == health.samples[-1][1].step
            yield Fault(kind, layer, operand, since, last, *ends, float(amount[1] if amount else 0.0))


def fault_of(cast: CastHealth, operand: str) -> tuple[Kind, float] | None:
    """Return the fault that one sample of a cast shows, and its amount."""
    if cast.non_finite:
        return "non_finite", cast.non_finite
    used, history = cast.used, cast.of_history
    if used is not None and used < COARSE[operand] and history and 1 / ALIKE < used / history < ALIKE:
        return "poisoned_history", used
    saturated, flushed = cast.saturated_pct or 0.0, cast.flushed_pct or 0.0
    if saturated >= SATURATED_PCT:
        return "saturated", saturated
    if any(db is not None and db < LEAST_DB[operand] for db in (cast.sqnr_db, cast.typical_db)):
        return ("flushed", flushed) if flushed >= NAMED_PCT else ("imprecise", cast.lowest_db or 0.0)
    return None


def rise_of(health: Health) -> Rise | None:
    """Find a loss that rose and stayed up."""
    points = [(sample.step, sample.loss) for _, sample in health.samples if sample.loss is not None]
    losses = [loss for _, loss in points]
    smooth = [statistics.median(losses[max(0, at - 2) : at + 1]) for at in range(len(losses))]
    lowest = min(range(len(smooth)), key=smooth.__getitem__, default=0)
    noise = statistics.median([abs(two - one) for one, two in pairwise(losses[: lowest + 1])] or [0.0])
    limit = smooth[lowest] + max(RISE * noise, RISE_SHARE * abs(smooth[lowest])) if smooth else 0.0
    high = [at for at in range(lowest + 1, len(points)) if losses[at] > limit]
    if not lowest or len(points) <= LASTING or high[-LASTING - 1 :] != [*range(len(points))][-LASTING - 1 :]:
        return None
    since = next(at for place, at in enumerate(high) if len(high) - place >= (len(points) - at) / 2)
    return Rise(points[since][0], smooth[lowest], losses[-1])


def _of_rise(rise: Rise, found: Sequence[Fault], health: Health) -> str:
    rose = f"The loss rises since step {rise.since:,}, from {rise.lowest:.4g} to {rise.last:.4g}."
    if found:
        return f"{rose} FP8 had lost precision by then: BF16 from a checkpoint would tell."
    if unseen := [each for each in health.layers.values() if each.unseen]:
        layers = plural(len(unseen), "layer")
        return f"{rose} Whether FP8 started it is unknown: inputs and gradients of {layers} were not sampled."
    return (
        f"{rose} FP8 did not start it: no layer lost precision before. Lower the learning rate or warm it up "
        "longer, and look at the data."
    )


def _of_healthy(health: Health) -> dict[Status, str]:
    if not health.layers:
        return {"unknown": "No layer trains in FP8: only loss and gradients were sampled."}
    if len(health.samples) < LASTING:
        return {"unknown": f"{plural(len(health.samples), 'step')} sampled: too few to judge."}
    seen = sum(each.unseen is None for each in health.layers.values())
    if not seen:
        return {"unknown": "Whether FP8 is healthy is unknown: inputs and gradients were not sampled."}
    lowest, steps = [min(each.values()) for each in health.lowest_db().values()], health.steps
    sound = f"FP8 is healthy in {seen} of {plural(len(health.layers), 'layer')}"
    low = f" Every tensor was at least {min(lowest):.0f} dB above its rounding error." if lowest else ""
    return {"healthy": f"{sound}, steps {steps[0]:,} to {steps[-1]:,}.{low}"}


def _concluded(found: Iterable[Fault], health: Health, *, after: bool = False) -> Iterator[Conclusion]:
    """Group faults that need one change, and say them."""
    groups: dict[tuple[Kind, str, bool], list[Fault]] = {}
    for fault in sorted(found, key=lambda each: (not each.lasts, each.since)):
        groups.setdefault((fault.kind, fault.operand, fault.lasts), []).append(fault)
    for members in groups.values():
        if after:
            advice, code = "This followed the rise of the loss.", ""
        else:
            advice, code = _advice(members, health) if members[0].lasts else ("It has ended.", "")
        yield Conclusion(f"{_sentence(members)} {advice}".strip(), code, tuple(members))


def _sentence(members: Sequence[Fault]) -> str:
    first = members[0]
    names = ", ".join(each.layer for each in members[:NAMED])
    more = f" and {len(members) - NAMED} more" if len(members) > NAMED else ""
    when = f"since step {first.since:,}"
    if not first.lasts:
        when = f"from step {first.since:,} to {max(each.last for each in members):,}"
    its, amount = f"{'its' if len(members) == 1 else 'their'} {first.operand}", first.amount
    what = {
        "non_finite": f"{its} has elements that are not finite {when}",
        "saturated": f"{percent(amount)} of {its} is too large for FP8 {when}",
        "flushed": f"{percent(amount)} of {its} has flushed to zero {when}",
        "imprecise": f"{its} is only {amount:.0f} dB above its rounding error {when}",
        "poisoned_history": f"{its} uses {percent(100 * amount)} of the scale's range {when}: the amax "
        f"history holds a value {1 / (amount or 1):,.0f} times as large",
    }[first.kind]
    return f"{names}{more}: {what}."


def _advice(members: Sequence[Fault], health: Health) -> tuple[str, str]:
    """Return what to do, and the lines."""
    by_name = health.layers
    layers = [by_name[each.layer] for each in members]
    if members[0].kind == "poisoned_history":
        return (
            "Scale by the tensor itself, or keep a shorter history (amax_history_len=16):",
            "from transformer_engine.common.recipe import Float8CurrentScaling\n"
            "with te.autocast(enabled=True, recipe=Float8CurrentScaling()):\n"
            "    output = model(batch)",
        )
    keep = f"Keep {'it' if len(layers) == 1 else 'them'} in BF16"
    if {layer.stack for layer in layers} != {TORCHAO.name}:
        return f"{keep}: build as torch.nn.Linear.", ""
    rows = {layer.recipe for layer in layers} == {"tensorwise"}
    note = '\n# or one scale per row: Float8LinearConfig.from_recipe_name("rowwise")' if rows else ""
    return f"{keep}:", keep_in_bf16([layer.name for layer in layers]).code + note
