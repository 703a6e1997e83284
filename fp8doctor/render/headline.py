"""The first line of the answer: what FP8 is now, and both times or their estimate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from fp8doctor.analysis.arms import timed_a_model, timed_on_cpu, uses_fp8
from fp8doctor.analysis.finite_steps import finite_steps
from fp8doctor.analysis.modelled_speedup import ModelledSpeedup
from fp8doctor.analysis.plan_end import gib_saved_at_no_cost
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.analysis.watched_speedup import watched_ms
from fp8doctor.analysis.whole_step import in_bounds, timed_alone
from fp8doctor.diagnosis.answer import GRAVE, Verdict
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import FAILED_EARLY, failed_early, nothing_in_fp8
from fp8doctor.diagnosis.planned_gain import stops_first
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.render.causes import as_is_ms, state_now, times_slower
from fp8doctor.render.ended_ranks import ended_rank
from fp8doctor.render.step_parts import estimate_told
from fp8doctor.render.timing import how_timed
from fp8doctor.wording import in_times, rounded_ms

Tone = Literal["bad", "good", "plain"]


OPEN = "FP8 may be faster or slower than BF16"
"""Says that nothing tells which of the two is faster."""


WHAT: dict[str, tuple[Tone, str]] = {
    "step_raises": ("bad", "The training step raises"),
    "layers_do_not_learn": ("bad", "Layers do not learn"),
    "not_finite": ("bad", "The loss is not finite"),
    "fp8_not_engaged": ("bad", "FP8 does not run: the job trains without it"),
    "fp8_slower": ("bad", "FP8 is slower than BF16"),
    "fp8_even": ("plain", "FP8 is about as fast as BF16"),
    "fp8_faster": ("good", "FP8 is faster than BF16"),
    "too_noisy": ("plain", "The timing is too noisy to tell"),
    "no_fp8": ("plain", "No FP8 training here"),
    "not_measured": ("plain", f"Not timed: {OPEN}"),
}
"""Status of the verdict -> how it looks, and what it says."""


NOT_SURELY = {"fp8_slower": "FP8 is not faster than BF16", "fp8_faster": "FP8 is not slower than BF16"}
"""Status of the verdict -> what of it holds if a quiet machine may make FP8 and BF16 even."""


TOO_LARGE = "It does not fit into the GPU's memory (estimated)"
"""Says that the step will not run on this GPU, in FP8 or in BF16."""


NO_LINEAR = "Nothing here that FP8 multiplies: train in BF16"
"""Says that a conversion takes no layer of this model."""


TOO_SMALL = "Too small for FP8: train in BF16"
"""Says that a conversion would make the step slower."""


STOPS = "The job stops before its first step"
"""Says that FP8 does not run because nothing does."""


ON_CPU = " on the CPU"
"""Stands behind a time that no GPU took."""


def headline(report: Document, steps: Sequence[Step]) -> tuple[Tone, str]:
    """Say what FP8 is now, and how that looks. ``steps`` are those of the plan that are shown."""
    verdict, facts = report.verdict, report.facts
    tone, what = WHAT.get(verdict.status, ("plain", verdict.status.replace("_", " ")))
    if verdict.status == "not_measured" and facts.get("observed.steps_ms"):
        what = f"Not compared: {OPEN}"
    if verdict.basis == "measured" and verdict.status not in GRAVE and timed_on_cpu(facts):
        tone = "plain"  # it predicts no GPU
    if failed_early(facts):
        return "bad", FAILED_EARLY
    if verdict.status == "fp8_not_engaged" and stops_first(facts, report.findings):
        return "bad", STOPS
    if not recorded(facts, "network"):
        return tone, "No model was examined"
    if ended := ended_rank(facts):
        return "bad", ended
    expects = estimate_told(report)
    if expects and not expects.recipes:
        of_all = not (is_estimated_alone(report) or expects.describes_no_watched_step)
        wins: Tone = "good" if expects.as_is_wins and of_all else "plain"
        tone = "bad" if times_slower(report, expects) else wins
    if state := state_now(report):
        return "bad" if state.severity == "error" else tone, state.title
    if verdict.status == "not_finite":
        return "bad", f"{what}{_in_which(report)}"
    told = _estimated(expects) if expects else _even(report) or what
    what = _as_sure_as_timed(report, told) or _with_its_size(report, steps, told)
    if (verdict.basis == "measured" and timed_alone(facts)) or is_estimated_alone(report):
        what = re.sub(r"\bFP8 (is|would)\b", r"FP8 compute \1", what, count=1)
        return _with_whole_step(verdict, tone, what)
    return tone, what


def _in_which(report: Document) -> str:
    """Say whether BF16 is finite; empty if that is unknown, or if the job holds no FP8."""
    finite = finite_steps(report.facts)
    alone = " in FP8; in BF16 it is" if finite.bf16 else ""
    return ", in BF16 too" if finite.bf16 is False and uses_fp8(report.facts) else alone


def _with_whole_step(verdict: Verdict, tone: Tone, what: str) -> tuple[Tone, str]:
    """Add the whole step to a title about compute, and its tone unless it is as fast for sure."""
    low, high = verdict.whole_step_low or 0.0, verdict.whole_step_high
    if high is None:
        return tone, what
    if tone == "good" and low < 1:
        tone = "bad" if high < 1 else "plain"
    return tone, f"{what}; the whole step {in_bounds(low, high)}"


def _even(report: Document) -> str:
    """Say what memory FP8 saves if it is measured to be as fast as BF16; else empty."""
    speed = trial_view(report.facts).speed
    if report.verdict.status != "fp8_even" or speed is None:
        return ""
    saved = if_recorded(gib_saved_at_no_cost, speed.bf16, speed.as_is, report.facts.trial)
    return f"{WHAT['fp8_even'][1]}; it saves {saved:.1f} GiB" if saved else ""


def is_estimated_alone(report: Document) -> bool:
    """Return whether the answer is an estimate of a rank's compute, in a job of several; a watched step is
    whole."""
    distributed = report.facts.get("training.distributed")
    several = distributed is not None and distributed.get("world_size", 1) > 1
    return several and estimate_told(report) is not None and watched_ms(report.facts) is None


def _as_sure_as_timed(report: Document, what: str) -> str:
    """Leave out what the timing does not decide: the size, or whether FP8 is even; else empty."""
    view = trial_view(report.facts)
    if view.may_become_even:
        return NOT_SURELY.get(report.verdict.status, what)
    return what if view.size_is_wrong else ""


def _with_its_size(report: Document, steps: Sequence[Step], what: str) -> str:
    """Say how many times slower or faster FP8 is, or that the plan leaves it off untimed."""
    verdict = report.verdict
    stays = any(step.treatment.name == STAY_IN_BF16 for step in steps)
    if nothing_in_fp8(verdict, report.facts):
        return NO_LINEAR
    if verdict.status == "not_measured" and verdict.basis is None and stays:
        return "FP8 cannot be faster than BF16 here (estimated)"
    if verdict.basis == "modelled" and verdict.status in ("fp8_slower", "fp8_even", "fp8_faster"):
        return f"{what} (estimated)"
    if verdict.status == "no_fp8" and verdict.basis == "measured" and verdict.achievable_speedup:
        return _as_timed(verdict.achievable_speedup)
    if verdict.status == "fp8_slower" and verdict.speedup and verdict.speedup < 1:
        return f"FP8 is {in_times(1 / verdict.speedup)} slower than BF16"
    if verdict.status == "fp8_faster" and verdict.speedup and verdict.speedup > 1:
        return f"FP8 is {in_times(verdict.speedup)} faster than BF16"
    return what


def _as_timed(speedup: float) -> str:
    """Say what the fastest FP8 that was timed gives a model without FP8."""
    if abs(speedup - 1) < EVEN:
        return "FP8 would be about as fast as BF16"
    how = "faster" if speedup > 1 else "slower"
    return f"FP8 would be {in_times(max(speedup, 1 / speedup))} {how} than BF16"


def _estimated(expects: ModelledSpeedup) -> str:
    """Say whether FP8 is faster, or would be, as far as the model's error allows."""
    if expects.recipes:
        if expects.wins:
            return f"FP8 would be about {in_times(expects.best)} faster than BF16"
        return TOO_SMALL if expects.loses else f"{_open(expects)} FP8 would be faster"
    if expects.is_of_another_step or expects.as_is is None:
        return OPEN
    bounds = expects.now_bounds if expects.describes_no_watched_step else None
    if expects.as_is_loses and bounds:
        low, high = bounds
        return f"FP8 is about {in_times(1 / high)} to {in_times(1 / low)} slower than BF16"
    if expects.as_is_loses:
        return f"FP8 is about {in_times(1 / expects.as_is)} slower than BF16"
    if expects.as_is_wins:
        return f"FP8 is about {in_times(expects.as_is)} faster than BF16"
    return f"{_open(expects)} FP8 is faster than BF16"


def _open(expects: ModelledSpeedup) -> str:
    return f"Too {'close' if expects.is_close else 'uncertain'} to tell whether"


def numbers_told(report: Document) -> str:
    """Write both times and their basis, else the times that the cost model expects."""
    verdict = report.verdict
    if expects := estimate_told(report):
        is_aside = ended_rank(report.facts) or state_now(report)
        of = "FP8 compute" if is_estimated_alone(report) else "FP8"
        if expects.is_of_another_step:
            bf16 = f"{expects.best:.2f}x BF16 (estimated for {expects.gpu}, {expects.range})"
            return f"{_now(report, expects)}; FP8 {expects.after}: {bf16}"
        return _estimate(expects, of if is_aside else "")
    if not verdict.step_ms:
        return ""
    watched = bool(report.facts.get("observed.steps_ms")) and timed_a_model(report.facts)
    where = ON_CPU if timed_on_cpu(report.facts) else " on copies" if watched else ""
    basis: str | None = verdict.basis
    if basis == "measured":
        basis = if_recorded(how_timed, report.facts) or basis
    if not verdict.bf16_step_ms or verdict.status == "no_fp8":
        timed = verdict.basis == "measured" and verdict.achievable_speedup
        now = " as you run it" if timed and not watched else ""
        return f"{verdict.step_ms:,.1f} ms/step{now}, {basis or 'as it ran'}{where}"
    if verdict.status in GRAVE:
        best = f"best BF16 {verdict.bf16_step_ms:,.1f}"
        now = "" if watched else " as you run it"
        return f"{verdict.step_ms:,.1f} ms/step{now}, {best}, {basis}{where}"
    if verdict.basis == "modelled":
        best = f"{verdict.bf16_step_ms:,.1f}, estimated"
        return f"{verdict.step_ms:,.1f} ms/step, measured{where}, vs {best}"
    return f"{verdict.step_ms:,.1f} vs {verdict.bf16_step_ms:,.1f} ms/step, {basis}{where}"


def _now(report: Document, expects: ModelledSpeedup) -> str:
    """Write the step as it is: as it ran, or the modelled one with what the fix of the title saves."""
    if ran_ms := watched_ms(report.facts):
        return f"{ran_ms:,.1f} ms/step as it ran"
    if not (now := as_is_ms(report, expects)) or not expects.parts:
        return "no estimate as it is"
    low, high = map(rounded_ms, now)
    return f"about {low} to {high} ms/step as it is, the best BF16 {expects.parts.bf16_ms:,.1f}"


def _estimate(expects: ModelledSpeedup, aside: str) -> str:
    """Write the estimate next to the headline, whose number it does not repeat.

    ``aside`` names what the estimate is of if the headline does not.
    """
    range_alone = expects.wins or expects.describes_no_watched_step
    if not aside and range_alone and (expects.recipes or not expects.gains_compiled):
        return f"estimated for {expects.gpu} ({expects.range})"
    later = f"; compiled {expects.best:.2f}x" if expects.gains_compiled else ""
    verb = "would run" if expects.recipes else "runs"
    begin = (
        f"{aside} {verb} at {expects.as_is:.2f}x BF16, estimated"
        if aside
        else f"estimated {expects.as_is:.2f}x"
    )
    return f"{begin} for {expects.gpu}{later} ({expects.range})"
