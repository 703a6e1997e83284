"""The fixes of the plan: which are shown, their lines, and what each saves."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fp8doctor.analysis.arms import lacked_time, timed_on_gpu
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.variant_names import numbered
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.finding import Saving
from fp8doctor.render.details import numbers
from fp8doctor.render.words import HOW_KNOWN
from fp8doctor.wording import rounded_ms


class Fix(Struct, frozen=True):
    """A step of the plan."""

    number: int
    summary: str
    aside: str
    """Where it is written and what it saves."""
    code: str
    lines: str


HOW_TO_USE = {
    "shell": "in the shell",
    "yaml": "in the job's YAML file",
    "sketch": "adapt these lines: fp8doctor could not see where your script does this",
}
"""Kind of lines -> what to do with them; Python's need no word."""


def _has_lines(code: str) -> bool:
    """Return whether there is more than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in code.splitlines())


def shown_fix(step: Step, steps: Sequence[Step], facts: Facts) -> Fix:
    fixes = numbers(steps)
    code = step.treatment.code
    how = HOW_TO_USE.get(step.treatment.kind, "") if _has_lines(code) else ""
    beside = numbered(step.together, fixes)
    gives = (
        f"its saving is counted in {beside}"
        if beside and step.saving_ms is None
        else f"together with {beside} {saves(step.saving_ms)}"
        if beside
        else saves(step.saving_ms, _after(step, steps)) or if_recorded(not_timed, step, facts) or ""
    )
    if gives.endswith(", measured") and facts.get("trial.blocks"):
        gives += " at two depths"
    return Fix(
        number=fixes[step.treatment.name],
        summary=step.treatment.summary,
        aside="; ".join(filter(None, (how, gives))),
        code=step.code,
        lines=code,
    )


def _after(step: Step, steps: Sequence[Step]) -> str:
    """Name a later fix whose end is where this one's saving begins: a model is converted, then compiled."""
    begins = step.saving_ms.from_ms if step.saving_ms else None
    later = enumerate(steps[steps.index(step) + 1 :], steps.index(step) + 2)
    ends = (n for n, each in later if begins and each.saving_ms and each.saving_ms.to_ms == begins)
    return next((f"with fix {n} " for n in ends), "")


def saves(saving: Saving | None, after: str = "") -> str:
    """Write a fix's saving and its basis: saves 28.0 ms/step, from 120.5 to 92.5, measured."""
    if saving is None:
        return ""
    if saving.from_ms is not None and saving.to_ms is not None:
        noise = " within noise" if saving.low < 0 < saving.high else ""
        verb = "saves" if saving.middle >= 0 else "costs"
        times = f"from {saving.from_ms:,.1f} {after}to {saving.to_ms:,.1f}"
        return f"{verb} {abs(saving.middle):,.1f} ms/step{noise}, {times}, {HOW_KNOWN[saving.basis]}"
    either_way = saving.low < 0 < saving.high
    ends = (saving.high, saving.low) if either_way else sorted((saving.low, saving.high), key=abs)
    first, last = map(rounded_ms, ends)
    how = HOW_KNOWN[saving.basis]
    where = f" for {saving.gpu}" if saving.basis == "modelled" and saving.gpu else ""
    verb = "saves" if saving.high >= 0 else "costs"
    ceiling = not saving.low and saving.high > 0
    amount = f"at most {last}" if ceiling else first if first == last else f"{first} to {last}"
    if either_way and (first, last) != ("0.0", "0.0"):
        either = f"{first} ms/step {_less(ends[0])} to {last} ms/step {_less(ends[1])}"
        begin = "too noisy to tell: from " if saving.basis == "measured" else "from "
        return f"{begin}{either}, {how}{where}"
    return f"{verb} {amount} ms/step, {how}{where}"


def _less(saved_ms: float) -> str:
    return "less" if saved_ms > 0 else "more"


def not_timed(step: Step, facts: Facts) -> str:
    """Say that a trial did not time this fix; empty if its gain is known, or if no fix was timed."""
    tried = [each for each in facts.arms() if each.tried] if timed_on_gpu(facts) else []
    done = any(step.treatment.name in each.get("treatments", ()) for each in tried)
    done = done and step.treatment.name not in TrialView(facts).open_in_bf16
    if not tried or done or step.saving_ms is not None:
        return ""
    name = step.treatment.name
    own = TrialView(facts).own_bf16_left_out if name == STAY_IN_BF16 else None
    late = own or next(
        (each for each in facts.trial.arms if lacked_time(each) and name in each.treatments), None
    )
    if late:
        return f"not timed: {(sentence_of(late) or '').removeprefix('it ')}"
    if any(name in each.get("treatments", ()) for each in facts.trial.arms):
        return "not timed"  # the table says why
    return f"not timed: {'no part of this trial' if traits(name).runs else 'fp8doctor cannot apply it'}"
