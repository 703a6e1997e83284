"""Two saved reports compared: both steps, their ratio, and its parts."""

from __future__ import annotations

from typing import Any

from fp8doctor.analysis.arms import as_shown, ratio_apart, timed_on_cpu
from fp8doctor.analysis.own_step import as_is
from fp8doctor.analysis.significance import Interval, swallows_effect
from fp8doctor.analysis.step_difference import (
    Waterfall,
    breakdown_of,
    parts_in_words,
    signed,
    waterfall,
    why_unknown,
)
from fp8doctor.analysis.timed_step import TimedStep, cautions, cpu_times, timed_step, unlike
from fp8doctor.diagnosis.document import SCHEMA_VERSION, Document, Tool, tool
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.wording import capital, labels, times


class Unlike(Record, frozen=True, kw_only=True):
    """A difference between the two jobs that makes a ratio of their times unfair."""

    what: str
    first: str
    second: str


class Comparison(Record, frozen=True, kw_only=True):
    """Two reports."""

    tool: Tool
    files: tuple[str, str]
    """Names without their folders."""
    steps: tuple[TimedStep, TimedStep]
    families_ms: tuple[dict[str, float], dict[str, float]] | None
    """Of either step, with ``idle``; None unless both have a breakdown that can be relied on."""
    speedup: Interval | None
    """Time of the first / time of the second, with the interval that both of theirs allow."""
    difference: Waterfall | None
    """The second less the first."""
    why_no_difference: str
    """Empty if there is one."""
    unlike: tuple[Unlike, ...]
    cautions: tuple[str, ...]
    """Reasons why a time is not that of a step: compilation, a CPU, unreliable timing."""
    appeared: tuple[str, ...]
    """Codes of findings, mere information aside, that only the second report has."""
    gone: tuple[str, ...]
    """Codes that only the first has."""
    summary: str

    @property
    def on_cpu(self) -> str:
        """Name the steps that a CPU took; empty if none."""
        return cpu_times(*self.steps)

    @property
    def is_noise(self) -> bool:
        """Return whether the timing leaves open which step is faster."""
        return self.speedup is not None and swallows_effect(self.speedup)

    def to_json(self) -> str:
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "comparison", **to_builtins(self)}
        return encode(data).decode()


def compared(first: Document, second: Document, files: tuple[str, str]) -> Comparison:
    """Compare the steps of two reports, which were saved as ``files``."""
    documents = first, second
    one, other = (timed_step(each.facts, name) for each, name in zip(documents, labels(*files), strict=True))
    speedup = _speedup(one, other)
    arms = [None if timed_on_cpu(each.facts) else as_is(each.facts) for each in documents]
    parts = [if_recorded(breakdown_of, arm) if arm else None for arm in arms]
    difference = if_recorded(waterfall, arms[1], arms[0]) if arms[0] and arms[1] else None
    families = [{**each.families_ms, "idle": each.idle_ms} for each in parts if each]
    unknown = [
        f"{step.name} {why_unknown(arm) if arm else 'ran on a CPU'}"
        for arm, step, found in zip(arms, (one, other), parts, strict=True)
        if (arm or step.on_cpu) and step.step_ms and not found
    ]
    differing = tuple(
        Unlike(what=what, first=of_first, second=of_second)
        for what, of_first, of_second in unlike(first.facts, second.facts)
    )
    codes = [[each.code for each in of.findings if each.severity != "info"] for of in documents]
    return Comparison(
        tool=tool(),
        files=files,
        steps=(one, other),
        families_ms=(families[0], families[1]) if difference else None,
        speedup=speedup,
        difference=difference,
        why_no_difference="" if difference else " and ".join(unknown),
        unlike=differing,
        cautions=(*cautions(first.facts, one), *cautions(second.facts, other)),
        appeared=tuple(code for code in codes[1] if code not in codes[0]),
        gone=tuple(code for code in codes[0] if code not in codes[1]),
        summary=_summary(one, other, speedup, difference, differing),
    )


def _speedup(one: TimedStep, other: TimedStep) -> Interval | None:
    """Divide the times of two steps; None without rounds of both."""
    if not one.rounds_ms or not other.rounds_ms:
        return None
    shown = as_shown(ratio_apart(one.rounds_ms, other.rounds_ms), one.step_ms, other.step_ms)
    return Interval(shown.value, shown.low, shown.high)


def _summary(
    one: TimedStep,
    other: TimedStep,
    speedup: Interval | None,
    difference: Waterfall | None,
    differing: tuple[Unlike, ...],
) -> str:
    if not one.step_ms or not other.step_ms:
        untimed = [f"{step.name} has no time: {step.missing}" for step in (one, other) if not step.step_ms]
        return f"Nothing can be compared: {'; '.join(untimed)}."
    faster = times(one.step_ms, other.step_ms)
    if on_cpu := cpu_times(one, other):
        ratio = on_cpu
    elif speedup is None:
        ratio = f"{faster} of its speed, how surely is not known (no rounds)"
    elif speedup.low <= 1 <= speedup.high:
        ratio = f"too close to tell apart ({speedup.low:.2f}x to {speedup.high:.2f}x)"
    else:
        ratio = f"{faster} of its speed ({speedup.low:.2f}x to {speedup.high:.2f}x)"
    both = f"{capital(other.name)} takes {other.step_ms:,.1f} ms/step, {one.name} {one.step_ms:,.1f}"
    things = ", ".join(each.what for each in differing)
    unfair = f" That is a ratio of unlike things: {things} differ." if things and not on_cpu else ""
    parts = f" {signed(difference.difference_ms)} ms = {parts_in_words(difference)}." if difference else ""
    return f"{both}: {ratio}.{unfair}{parts}"


def checked_baseline(facts: Facts, name: str) -> Facts:
    """Return the facts of a baseline. Raises `UserError` if they hold no time."""
    step = timed_step(facts, name)
    if not step.step_ms:
        raise UserError(f"{name} is no baseline, it holds no time of a step: {step.missing}")
    return facts


def regression(baseline: Facts, facts: Facts, name: str, most_pct: float) -> str | None:
    """Say why a step misses the baseline saved as ``name``. At most ``most_pct`` longer is none."""
    one, other = timed_step(baseline, name), timed_step(facts, "the step")
    if not one.step_ms or not other.step_ms:
        return f"no step was timed to compare with {name}: {other.missing}"
    if on_cpu := cpu_times(one, other):
        return on_cpu
    longer_pct = 100 * (other.step_ms / one.step_ms - 1)
    speedup = _speedup(one, other)
    if other.step_ms - one.step_ms <= one.step_ms * most_pct / 100 or (speedup and speedup.high >= 1):
        return None
    things = ", ".join(what for what, *_ in unlike(baseline, facts))
    return (
        f"the step takes {other.step_ms:,.1f} ms, {longer_pct:.1f}% more than the {one.step_ms:,.1f} ms of "
        f"{name}{f', of which differ: {things}' if things else ''}"
    )
