"""Waits of a watched script: for data, for copies, and others than its trial's."""

from __future__ import annotations

from statistics import median

from msgspec import Struct

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.significance import interval
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import percent

MOST_PCT = 10.0
"""Share of the step, in per cent, from which waiting is reported before anything about FP8. A choice: three
times what this tool calls even (3%), so that fixing it moves the step more than noise does."""

LEAST_MS = 1.0
"""Part of a step, in ms, below which it is not reported, whatever its share. A choice: a loop in Python takes
tenths of it between two steps, and more on a busy host."""


class Waiting(Struct, frozen=True):
    """Medians of the watched steps, in ms."""

    step_ms: float
    data_ms: float | None
    """Waited inside torch's DataLoader; None if no such loader was asked."""
    before_forward_ms: float | None
    """From the end of a step to the next call of the model, that wait included; None if none was seen."""

    copies_ms: float
    """Copies from the host to the GPU that nothing covered, of the one step that was profiled; 0 if none
    was."""

    @property
    def shown_ms(self) -> float:
        """Waits that have names."""
        return (self.data_ms or 0.0) + self.copies_ms

    @property
    def else_ms(self) -> float:
        """Return the time between two steps that is neither the loader's nor a copy's."""
        return max(0.0, (self.before_forward_ms or 0.0) - self.shown_ms)


def counts(ms: float, step_ms: float) -> bool:
    """Return whether a part of a step is long enough to report."""
    return ms >= LEAST_MS and 100 * ms >= MOST_PCT * step_ms


def waiting(facts: Facts) -> Waiting:
    """Compute the medians of a window."""
    observed = facts.observed
    return Waiting(
        step_ms=median(observed.steps_ms),
        data_ms=None if observed.data_ms is None else median(observed.data_ms),
        before_forward_ms=None if observed.before_forward_ms is None else median(observed.before_forward_ms),
        copies_ms=observed.get("host_copies_ms", 0.0),
    )


def host_is_ahead(facts: Facts) -> bool:
    """Return whether the host launches work long before the GPU finishes it."""
    behind_ms: tuple[float, ...] | None = facts.get("observed.behind_ms")
    if behind_ms is None:
        return False
    return 100 * median(behind_ms) >= MOST_PCT * median(facts.observed.steps_ms)


def waiting_first(facts: Facts) -> str:
    """Say what the step waits for, if that matters more than FP8; else empty."""
    waits, told = waiting(facts), []
    for ms, words in (
        (waits.data_ms or 0.0, "waits for its data {}"),
        (waits.copies_ms, "waits for copies from the host to the GPU {}"),
        (waits.else_ms, "spends {} on something else before the model is called"),
    ):
        if counts(ms, waits.step_ms):
            share = percent(100 * ms / waits.step_ms)
            told.append(words.format(f"{ms:,.1f} of {waits.step_ms:,.1f} ms ({share})"))
    return f"The step {' and '.join(told)}" if told else ""


def script_overhead(facts: Facts) -> str:
    """Say how much longer the script's step is, beyond waits and scatter; else empty."""
    if facts.observed.clock != "cuda" or not recorded(facts, "trial.arms") or facts.trial.device == "cpu":
        return ""
    copy = arm(facts.trial, ArmName.AS_IS)
    if copy is None or not copy.step_ms:
        return ""
    own, waits = interval(facts.observed.steps_ms), waiting(facts)
    waited_ms = max(waits.before_forward_ms or 0.0, waits.shown_ms)
    longest = copy.get("high_ms") or copy.step_ms
    if not counts(own.low - waited_ms - longest, own.median):
        return ""
    whole = f"{own.median:,.1f} ms ({own.low:,.1f} to {own.high:,.1f})"
    return f"The script's own step takes {whole}, a copy of it {copy.step_ms:,.1f} ms"
