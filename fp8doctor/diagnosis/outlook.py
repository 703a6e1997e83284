"""The end of the plan: the step with all fixes, or BF16 if FP8 does not pay."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import inf

from msgspec import Struct

from fp8doctor.analysis.arms import changes_in_bf16, fair_bf16, lacked_time, ratio_on_screen, uses_fp8
from fp8doctor.analysis.estimated_gain import GAIN, EstimatedGain
from fp8doctor.analysis.fp8_request import trains_in_16_bits
from fp8doctor.analysis.memory_fit import step_now
from fp8doctor.analysis.modelled_speedup import KEPT, ModelledSpeedup
from fp8doctor.analysis.no_estimate import no_model_of
from fp8doctor.analysis.noise import is_noise
from fp8doctor.analysis.plan_end import PlanEnd
from fp8doctor.analysis.significance import EVEN, is_even
from fp8doctor.analysis.treatment_table import (
    CUDA_GRAPHS,
    MORE_TOKENS,
    STAY_IN_BF16,
    in_words,
    that_help_bf16_too,
    traits,
)
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.analysis.watched_speedup import watched_ms
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import expected_speedup
from fp8doctor.diagnosis.giving_up import changes_fp8, planned_speedup, stays_in_bf16
from fp8doctor.diagnosis.next_step import failed_to_time, timed, with_more_time
from fp8doctor.diagnosis.planned_gain import (
    begins_fp8,
    converts,
    is_modelled,
    planned_gain,
    stops_first,
    why_fixed_is_unknown,
    why_now_is_unknown,
)
from fp8doctor.facts import Arm, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName, is_in_bf16
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.finding import Basis
from fp8doctor.wording import in_ms, in_times, quotient, rounded_ms

SMALL_PCT = 1.0
"""Share of the step, in per cent, below which what a line of the plan saves is folded: half of what a step
timed against its own copy may differ by."""


NOT_FIXED = "fp8doctor has not timed the fixed step"


EXPOSED = "DST005"
"""The check of communication that no compute covers: it is of the whole step, and copies have none."""


class End(Struct, frozen=True):
    """Where a plan ends."""

    told: str
    """The time of a step with the plan; empty if no job was examined."""
    basis: Basis | None = None
    """None if nothing is known of it."""
    begins: str = ""
    """Names the fixes that are in this step, if ``told`` does not."""

    @property
    def sentence(self) -> str:
        return f"{self.begins}: {self.told}" if self.begins else self.told


def outlook(report: Document, steps: Sequence[Step] | None = None) -> End:
    """Say what a step will take once the plan is carried out.

    ``steps`` are those of the plan that are shown, all of them if none are given.
    """
    facts, steps = report.facts, report.prescription if steps is None else steps
    if not recorded(facts, "network") or not (bool(steps) or if_recorded(uses_fp8, facts)):
        return End("")
    if measured := if_recorded(_measured, trial_view(facts), steps):
        return measured
    if modelled := if_recorded(_modelled, report, steps):
        return modelled
    if not steps:
        return End("")
    known = bool(facts.arms()) or if_recorded(planned_speedup, facts, report.findings, steps) is not None
    why = "" if known else why_fixed_is_unknown(report, steps)
    how = f" {once_applied(steps)}{timed(facts)}" if why and timed(facts) else ""
    fixed = "Fixed, the step trains in BF16; it was not timed" if stays_in_bf16(steps) else NOT_FIXED
    return End(f"{fixed}. {why}{how}".rstrip())


def _measured(view: TrialView, steps: Sequence[Step]) -> End | None:
    end = view.end
    if not view.on_gpu or view.bf16 is None:
        return None
    total = end.arm if end else _total(view, steps)
    if total is None or total.step_ms is None:
        return None
    than = step_now(view.facts)
    if end and end.in_bf16 and (view.uses_fp8 or not end.is_as_is):
        faster = f", {_compared(total, view.as_is, than)}" if view.as_is and not end.is_as_is else ""
        told = f"{in_ms(total.step_ms)} in {_form(total, steps)}{faster}"
        if not view.uses_fp8 and any(
            changes_fp8(step) for step in steps if step.treatment.name != STAY_IN_BF16
        ):
            return End(f"FP8 was not timed. Without it: {told}.", "measured")
        done = {*end.changes, STAY_IN_BF16}
        others = [n for n, step in enumerate(steps, 1) if step.treatment.name not in done]
        left_out = _left_out(view, done) if view.uses_fp8 else ()
        rest = " ".join([_beside(steps, others, total.step_ms), *left_out])
        host = " on this busy host" if faster and view.may_become_even else ""
        if view.own_bf16_left_out:
            return End(f"Not timed. Without your own torch.compile: {told}{host}.{rest}")
        return End(f"{told}{host}.{rest}", "measured")
    done = set(end.changes if end else total.get("treatments", ()))
    others = [n for n, step in enumerate(steps, 1) if step.treatment.name not in done]
    more = _beside(steps, others, total.step_ms) if done else ""
    told, how = _against(view, total, than, steps), timed(view.facts)
    if any(step.code == EXPOSED for step in steps) and (ran_ms := watched_ms(view.facts)):
        than = f"the whole step, {in_ms(ran_ms)} now"
    untimed = how and steps and total.name == ArmName.AS_IS
    rest = f" {once_applied(steps)}{how}" if untimed else more
    return End(f"{told}{rest}", "measured", beginning(total, steps, end, than))


def _left_out(view: TrialView, done: Collection[str]) -> Iterator[str]:
    """Say what the budget left no time for and may be faster than this BF16, and how to time it."""
    longer, trial = with_more_time(view.facts), view.facts.trial
    late = [_form(view.left_out_bf16)] if view.left_out_bf16 else []
    if untimed := [*late, *_changes_open_in_bf16(trial, done)]:
        how = f": {longer}" if longer and not view.fp8_is_undecided else "."
        budget_s = trial.get("budget_s")
        short = f"The budget{f' of {budget_s:g} s' if budget_s else ''} was too short to time"
        yield f"{short} {' and '.join(untimed)}, which may be faster{how}"
    if view.fp8_is_undecided:
        more = longer if view.deciding_fp8 else ""
        how = "Time more variants" if more else "Time it again on a quiet machine"
        command = more or timed(view.facts)
        yield f"FP8 is undecided. {how}{f': {command}' if command else '.'}"


def _changes_open_in_bf16(trial: Trial, done: Collection[str]) -> list[str]:
    """Name the BF16 with those changes that the budget left no time to time in BF16."""
    late = [
        changes_in_bf16(each.name, each.get("treatments", ())) for each in trial.arms if lacked_time(each)
    ]
    words = sorted(map(in_words, frozenset().union(*late).difference(done, [CUDA_GRAPHS])))
    return [f"BF16 with {' and '.join(words)}"] if words else []


def _numbered(fixes: Sequence[int]) -> str:
    return f"{'fix' if len(fixes) == 1 else 'fixes'} {' and '.join(map(str, fixes))}"


def _total(view: TrialView, steps: Sequence[Step]) -> Arm | None:
    """Find the step that a plan without a known end may lead to."""
    if not view.uses_fp8:
        return view.fp8
    return (view.prescribed or view.as_is) if steps else view.as_is


def beginning(total: Arm, steps: Sequence[Step], end: PlanEnd | None, than: str = "now") -> str:
    """Name the fixes of the plan that are in a timed step; one in BF16 has the fix that leaves FP8 off."""
    if not steps:
        return "As it is"
    if total.name == ArmName.AS_IS:
        gain = _gain(None, steps, than)
        known = f" ({gain}, estimated)" if gain else ""
        fixes, them = ("fixes were", "them") if len(steps) > 1 else ("fix was", "it")
        return f"The {fixes} not timed{known}; before {them}"
    timed = end.changes if end else total.get("treatments", ())
    timed = (*timed, STAY_IN_BF16) if end and end.in_bf16 else timed
    of_it = [str(number) for number, step in enumerate(steps, 1) if step.treatment.name in timed]
    if not timed or len(of_it) == len(steps):
        return _with_all(steps)
    return f"With {'fix' if len(of_it) == 1 else 'fixes'} {' and '.join(of_it)} alone" if of_it else "Timed"


def _with_all(steps: Sequence[Step]) -> str:
    return "With all fixes" if len(steps) > 1 else WITH_THIS_FIX


WITH_THIS_FIX = "With this fix"
"""Begins what is said of the only fix."""


def _against(view: TrialView, total: Arm, than: str, steps: Sequence[Step]) -> str:
    """Compare a step with its BF16 and with the step as it is."""
    now, measure = in_ms(total.step_ms), fair_bf16(view.facts, total)
    changed = view.as_is is not None and total.name != ArmName.AS_IS
    gain = f", {_compared(total, view.as_is, than)}" if changed and view.as_is else ""
    joined = ";" if gain else ","
    if measure is None:
        late = _alike_in_bf16(view.facts.trial, total)
        why = sentence_of(late) if late else "it was no part of this trial"
        fixes = "these fixes" if len(steps) > 1 else "this fix"
        longer = late is not None and lacked_time(late)
        how, begins = timed(view.facts, longer=longer), "To time it: " if longer else once_applied(steps)
        return (
            f"{now}{gain}; BF16 with the same changes was not timed ({why}), so whether FP8 is faster than "
            f"BF16 with {fixes} is open.{f' {begins}{how}' if how else ''}"
        )
    speedup = ratio_on_screen(measure, total)
    if view.uses_fp8 and view.left_out_bf16 is not None and speedup.high >= 1:
        more = f". To time it: {how}" if (how := with_more_time(view.facts)) else "."
        return f"{now}{gain}; {_form(view.left_out_bf16)}, which may be faster, was not timed{more}"
    ms = in_ms(measure.step_ms)
    if is_noise(measure, total, view.facts.trial):
        return f"{now}{gain}{joined} within noise of {_form(measure)} ({ms})."
    if view.size_is_wrong:
        return f"{now}{gain}. BF16 was disturbed ({ms})."
    if measure.name == ArmName.AS_IS and changed:
        return f"{now}{gain} ({ms})."
    best = "the best BF16" if measure is view.bf16 else _form(measure)
    if is_even(speedup):
        return f"{now}{gain}{joined} about as fast as {best} ({ms})."
    return f"{now}{f'{gain} and' if gain else ','} {_compared(total, measure, f'{best} ({ms})')}."


def _alike_in_bf16(trial: Trial, total: Arm) -> Arm | None:
    """Find the BF16 that has a step's changes, if the trial planned it and did not time it."""
    shared = that_help_bf16_too(total.get("treatments", ()))
    planned = (each for each in trial.arms if is_in_bf16(each.name) and not each.tried)
    return next((each for each in planned if changes_in_bf16(each.name, each.treatments) == shared), None)


def _compared(one: Arm, other: Arm, named: str) -> str:
    """Compare two times in words: 1.22x faster than the other."""
    speed = quotient(other.step_ms, one.step_ms) or 1.0
    if f"{max(speed, 1 / speed):.2f}" == "1.00":
        return f"as fast as {named}"
    return f"{in_times(max(speed, 1 / speed))} {'faster' if speed > 1 else 'slower'} than {named}"


FORMS: dict[str, str] = {
    ArmName.BF16_COMPILED: "compiled BF16",
    ArmName.BF16_AS_COMPILED: "BF16 under your own torch.compile",
    ArmName.BF16_WITHOUT_CHECKPOINTING: "BF16 without checkpointing",
    ArmName.BF16_CUDA_GRAPHS: "compiled BF16 with CUDA graphs",
}
"""BF16 variant -> its form in a sentence."""


def _form(bf16: Arm, steps: Sequence[Step] = ()) -> str:
    """Name a BF16 variant; one that has other fixes of the plan, by their numbers."""
    made_of = bf16.get("treatments", ())
    numbers = [n for n, step in enumerate(steps, 1) if step.treatment.name in made_of]
    if numbers and bf16.name not in FORMS:
        return f"BF16 with {_numbered(numbers)}"
    return FORMS.get(bf16.name) or (
        "BF16 with the same fixes" if changes_in_bf16(bf16.name, made_of) else "BF16"
    )


def _modelled(report: Document, steps: Sequence[Step]) -> End | None:
    facts, findings = report.facts, report.findings
    expects, gains = planned_speedup(facts, findings, steps), planned_gain(facts, findings, steps)
    if expects is None and trains_in_16_bits(facts):
        return None
    if stays_in_bf16(steps):
        return End(_without_fp8(expects, gains, report, steps), "modelled")
    if expects is None:
        return None
    converted = any(map(converts, steps))
    if expects.recipes and not begins_fp8(steps, expects) and not facts.get("trial.arms"):
        compiles = next((step for step in steps if traits(step.treatment.name).compiles), None)
        told = f"{compiles.title}." if compiles else _unknown_gain(report, steps)
        return End(told, "modelled") if steps else None
    advice = (
        "" if expects.wins else "; a larger batch may pay" if expects.loses else ", too uncertain to tell"
    )
    as_is = f"{expects.after[:1].upper()}{expects.after[1:]}" or "As it is"
    if not steps and expects.as_is and expects.gains_compiled:
        speed = f"about {expects.as_is:.2f}x the speed of the best BF16, {expects.best:.2f}x compiled"
        return End(f"{speed} (estimated for {expects.gpu}).", "modelled", as_is)
    more_tokens = any(step.treatment.name == MORE_TOKENS for step in steps)
    current = None if more_tokens else expected_speedup(facts, findings)
    now, than_now = current.now if current else None, step_now(facts)
    if steps and now and not converted and gains is None:
        saved, sure = _gain(None, steps, than_now), expects.wins or expects.loses
        still = "" if sure else f" FP8 may be faster.{_how_to_find(report, steps)}"
        if not saved:
            return End(_unknown_gain(report, steps), "modelled")
        return End(f"{saved} (estimated).{still}", "modelled", _with_all(steps))
    held = counted(steps)
    fixes = as_is if expects.after == KEPT or not steps else f"With {counted_in_words(steps, 'this fix')}"
    beginning = "With FP8" if expects.recipes and not converted else fixes
    is_best = bool(steps and now and f"{now:.2f}" == "1.00")
    faster = is_best and expects.best > 1
    than = f"{expects.best:.2f}x the speed of"
    if faster:
        than = f"{in_times(expects.best)} faster than {than_now}, already"
    if not faster and (expects.describes_no_watched_step or (gains and gains.may_keep_ms)):
        than = f"{expects.range} the speed of"  # both ends, like the gain
    about = "" if than.startswith(expects.range) else "about "
    speed = f"{about}{than} the best BF16 (estimated for {expects.gpu}){advice}."
    gain = "" if is_best else _gain(gains, held, than_now)
    known = not steps or gain or is_best or report.verdict.status in GRAVE
    why = "a step with more tokens is other work" if more_tokens else "there is none of the step as it is"
    later, how = "", ""
    if not known:
        later, how = f" No estimate of the gain over now: {why}.", _how_to_find(report, steps)
    apart = [n for n, step in enumerate(steps, 1) if step not in held]
    told = f"{gain and f'{gain}, '}{speed}{later}{_beside(steps, apart)}{how}"
    return End(told, "modelled", beginning)


def _beside(steps: Sequence[Step], numbers: Sequence[int], of_ms: float = inf) -> str:
    """Say what fixes are estimated to save that the time before, a step ``of_ms``, does not count."""
    told = ""
    for n in numbers:
        saving = steps[n - 1].saving_ms
        if saving and saving.basis == "modelled" and 0 < saving.high < of_ms:
            low, high = map(rounded_ms, (max(saving.low, 0), saving.high))
            ends = f"{low} to {high}" if saving.low > 0 else f"at most {high}"
            told += f" Fix {n} saves {ends} ms/step (estimated), not counted here."
    return told


def counted(steps: Sequence[Step]) -> Sequence[Step]:
    """List the fixes of the plan that the estimate of its step counts."""
    return [step for step in steps if not step.saving_ms or is_modelled(step)] or steps


def counted_in_words(steps: Sequence[Step], one: str = "the fix") -> str:
    """Name the fixes that the estimate of the plan's step counts: all fixes, fixes 1 and 3."""
    held = counted(steps)
    if len(held) == len(steps):
        return "all fixes" if len(steps) > 1 else one
    return _numbered([n for n, step in enumerate(steps, 1) if step in held])


def _without_fp8(
    expects: ModelledSpeedup | None,
    gain: EstimatedGain | None,
    report: Document,
    steps: Sequence[Step],
) -> str:
    """Say what a plan that stays in BF16 gives, and what FP8 would cost."""
    if expects is None:
        why = why_fixed_is_unknown(report, steps)
        return f"FP8 cannot win here (estimated). {why}{_how_to_find(report, steps)}"
    slower, basis = f"about {in_times(1 / expects.best)} slower", f"(estimated for {expects.gpu})"
    fp8, than = f"FP8 with every fix would be {slower}", " than that"
    if not expects.loses:
        fp8, than = f"FP8 is not expected to win here, {expects.range}", ""
    if gain is None:
        ms = f" ({expects.parts.bf16_ms:,.1f} ms/step)" if expects.parts else ""
        why = f"No estimate as it is: {why_now_is_unknown(report)}."
        if stops_first(report.facts, report.findings):
            why = "As it is, the job stops before its first step."
        return f"Fixed, the step runs in the best BF16{ms}. {fp8}{than} {basis}. {why}"
    if gain.now_ms < gain.bf16_ms * (1 + EVEN):
        return f"The step stays as it is, in the best BF16. {fp8} {basis}."
    step = f" ({gain.now_ms:,.1f} ms/step; {gain.bf16_ms:,.1f} in the best BF16)"
    faster = f"About {_between(*gain.faster)} faster than {step_now(report.facts)}{step}"
    if in_times(gain.now_ms / gain.bf16_ms) == in_times(1 / expects.best):
        return f"{faster} {basis}."
    return f"{faster}. {fp8}{than} {basis}."


def _between(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys((in_times(low), in_times(high))))


def _gain(gains: EstimatedGain | None, steps: Sequence[Step], than: str) -> str:
    """Say what the plan is estimated to gain over the step as it is; empty if that is unknown."""
    if gains and gains.faster[1] >= 1 + GAIN:
        return f"about {_between(*gains.faster)} faster than {than}"
    saved = [each.saving_ms for each in steps if each.saving_ms and each.saving_ms.high > 0]
    if not saved:
        return ""
    most = max(saved, key=lambda each: each.low)
    low, high = map(rounded_ms, (most.low, most.high))
    several = len(steps) > 1 and most.low > 0
    range_ms = f"at least {low}" if several else f"{low} to {high}" if most.low > 0 else f"at most {high}"
    return f"{range_ms} ms/step less than {than}"


def _unknown_gain(report: Document, steps: Sequence[Step]) -> str:
    """Say why the estimate knows nothing of what the plan changes, and how to find its gain."""
    why = no_model_of(step.code or step.treatment.name for step in steps)
    return f"No estimate of the gain: {why}.{_how_to_find(report, steps)}"


def _how_to_find(report: Document, steps: Sequence[Step]) -> str:
    how = timed(report.facts) if report.next and not failed_to_time(report.facts) else None
    return f" {once_applied(steps)}{how}" if how else ""


def once_applied(steps: Sequence[Step]) -> str:
    """Begin a sentence that ends with the command."""
    return f"Apply the fix{'es' if len(steps) > 1 else ''}, then time the step: "


def loses_as_modelled(report: Document) -> bool:
    """Return whether FP8 with the plan is slower too, by more than the model's error."""
    expects = planned_speedup(report.facts, report.findings, report.prescription)
    return expects is not None and expects.loses
