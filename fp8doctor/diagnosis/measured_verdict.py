"""The verdict of a trial: FP8 compared with the best BF16, and with the plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor.analysis.arms import arm, changes_in_bf16, fair_bf16, is_finite, saved_ms, timed_a_model
from fp8doctor.analysis.modelled_speedup import bf16_for_timed_step
from fp8doctor.analysis.noise import is_noise, stated_doubt
from fp8doctor.analysis.outcome import MeasuredSpeed, Speed, fp8_never_ran
from fp8doctor.analysis.step_difference import watched_on_gpu
from fp8doctor.analysis.treatment_table import TE_AUTOCAST, that_help_bf16_too
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost import micro_batches, step_tokens
from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.diagnosis.expected_verdict import is_what_it_seems
from fp8doctor.diagnosis.leaving_fp8 import nothing_helps
from fp8doctor.facts import Arm, Facts, Trial, if_recorded
from fp8doctor.facts.arm_names import (
    BF16_BASELINES,
    ArmName,
    is_conversion,
    keeps_users_compilation,
    recipe_of,
)
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.finding import Finding
from fp8doctor.wording import in_ms, plural, times

ALIKE: dict[str, str] = {
    ArmName.BF16_WITHOUT_CHECKPOINTING: "checkpointing off",
    ArmName.BF16_CUDA_GRAPHS: "CUDA graphs",
}
"""BF16 with a change that helps it too -> the change in words."""


def measured_verdict(view: TrialView, findings: Sequence[Finding] = ()) -> Verdict | None:
    """Give the verdict of a trial; None if nothing was timed.

    ``findings`` say whether a baseline that is missing can be modelled.
    """
    facts = view.facts
    if not timed_a_model(facts):
        return None
    if view.as_is is None:
        return _without_as_is(facts, view.bf16)
    if not view.uses_fp8:
        return without_fp8(view, view.as_is)
    measured = view.speed
    if measured is None:
        return _without_bf16(view, view.as_is, is_what_it_seems(findings))
    tokens_per_s = _tokens_per_s(facts, view.as_is)
    rate = (
        f" ({tokens_per_s:,.0f} tokens/s)" if tokens_per_s and not if_recorded(watched_on_gpu, facts) else ""
    )
    noisy = measured.status == "too_noisy"
    now = _too_noisy(measured, rate) if noisy else _speed(measured, rate)
    most = "" if noisy or measured.bound else _most(view)
    return Verdict(
        status=measured.status,
        summary=f"{now}{_promise(view)}{_disturbed(view)}{most}{_caveat(facts.trial)}",
        speedup=None if noisy else measured.speedup.median,
        speedup_low=measured.speedup.low,
        speedup_high=measured.speedup.high,
        basis="measured",
        achievable_speedup=view.achievable,
        step_ms=view.as_is.step_ms,
        bf16_step_ms=measured.bf16.step_ms,
        tokens_per_s=tokens_per_s,
    )


def _speed(measured: MeasuredSpeed, rate: str) -> str:
    ms, bf16_ms = measured.as_is.step_ms, measured.bf16.step_ms
    speed = f"FP8 runs at {times(bf16_ms, ms)} the speed of BF16"
    wrong = (
        f" Their kernel times allow at most {measured.bound:.2f}x, so a step was disturbed."
        if measured.bound
        else ""
    )
    return f"{speed}: {in_ms(ms)}/step{rate}, best BF16 {in_ms(bf16_ms)}.{wrong}"


def _too_noisy(measured: MeasuredSpeed, rate: str) -> str:
    """Say that the timing does not decide whether FP8 is faster, and why."""
    speedup, rounds = measured.speedup, plural(len(measured.as_is.rounds_ms), "round")
    why = (
        f"BF16 time / FP8 time is between {speedup.low:.2f} and {speedup.high:.2f} over {rounds}"
        if measured.noise == "wide_interval"
        else "the GPU waited for a busy CPU, long enough to change the answer"
        if measured.noise == "busy_host"
        else "they differ no more than a step and its own copy"
    )
    return (
        f"The timing is too noisy to tell whether FP8 is faster than BF16: {why}. FP8 takes about "
        f"{in_ms(measured.as_is.step_ms)}/step{rate}, the best BF16 {in_ms(measured.bf16.step_ms)}."
    )


def _disturbed(view: TrialView) -> str:
    """Name the host contention that the answer depends on."""
    what = view.host_contention
    return f" The CPU was busy meanwhile ({what}). Time again on an idle host." if what else ""


def _without_bf16(view: TrialView, as_is: Arm, can_be_modelled: bool) -> Verdict:
    """Compare the timed step with a modelled BF16, no slower than a timed BF16."""
    assert as_is.step_ms is not None
    facts, bf16 = view.facts, view.bf16
    missing = view.left_out_bf16 or next(
        (each for each in facts.trial.arms if each.name in BF16_BASELINES), None
    )
    why = sentence_of(missing) if missing else "it was not tried"
    timed = (
        f"FP8 takes {in_ms(as_is.step_ms)}/step. No BF16 baseline could be timed: {why}."
        if bf16 is None or bf16.step_ms is None
        else f"FP8 takes {in_ms(as_is.step_ms)}/step, BF16 {in_ms(bf16.step_ms)}. Compiled BF16, which may "
        f"be faster, was not timed: {why}."
    )
    expects = if_recorded(bf16_for_timed_step, facts) if can_be_modelled else None
    answer = Verdict(
        status="not_measured",
        summary=f"{timed}{_caveat(facts.trial)}",
        basis="measured",
        step_ms=as_is.step_ms,
        tokens_per_s=_tokens_per_s(facts, as_is),
    )
    if expects is None or expects.as_is is None:
        return answer
    speedup = min(expects.as_is, bf16.step_ms / as_is.step_ms if bf16 and bf16.step_ms else expects.as_is)
    bf16_ms = as_is.step_ms * speedup
    status: Speed = "fp8_slower" if speedup < 1 else "fp8_faster"
    return msgspec.structs.replace(
        answer,
        status="fp8_even" if abs(speedup - 1) < expects.may_be_off else status,
        summary=f"{timed} The best BF16 would take about {in_ms(bf16_ms)}, so FP8 runs at about "
        f"{speedup:.2f}x its speed (estimated for {expects.gpu}).{_caveat(facts.trial)}",
        basis="modelled",
        speedup=speedup,
        bf16_step_ms=bf16_ms,
        achievable_speedup=max(speedup, expects.compiled),
    )


def _tokens_per_s(facts: Facts, as_is: Arm) -> float | None:
    """Compute the tokens of a whole step, with all its micro-batches, by its time: a watched script's own."""
    watched = if_recorded(watched_on_gpu, facts)
    tokens, step_ms = step_tokens(facts), (watched or as_is).step_ms
    return tokens * micro_batches(facts) / step_ms * 1e3 if tokens and step_ms else None


def without_fp8(view: TrialView, as_is: Arm, finding: str = "This model uses no FP8.") -> Verdict:
    """Return the verdict on a timed model without FP8, beginning with ``finding``."""
    return Verdict(
        status="no_fp8",
        summary=f"{finding} {_offer(view)}{_most(view)}{_caveat(view.facts.trial)}",
        basis="measured",
        achievable_speedup=view.achievable,
        step_ms=as_is.step_ms,
        bf16_step_ms=view.bf16.step_ms if view.bf16 else None,
        tokens_per_s=_tokens_per_s(view.facts, as_is),
    )


def _without_as_is(facts: Facts, bf16: Arm | None) -> Verdict:
    trial = facts.trial
    if fp8_never_ran(trial):
        running = arm(trial, ArmName.PRESCRIBED) or arm(trial, TE_AUTOCAST)
        gives = (
            f" Once it runs: {in_ms(running.step_ms)}, {times(bf16.step_ms, running.step_ms)} the speed of "
            "BF16."
            if running and bf16
            else ""
        )
        summary = f"FP8 is set up and does not run: no FP8 matmul was seen in a training step.{gives}"
        return Verdict(status="fp8_not_engaged", summary=summary, basis="measured")
    attempted = next((sentence_of(each) for each in trial.arms if each.name == ArmName.AS_IS), None)
    reason = attempted or trial.reason or "no time was left"
    untimed = "No copy of the step was" if facts.get("observed.steps_ms") else "The step could not be"
    return Verdict(status="not_measured", summary=f"{untimed} timed: {reason}.")


def _promise(view: TrialView) -> str:
    """Say what the plan gives, or that nothing tried makes FP8 as fast as BF16."""
    facts, as_is, prescribed = view.facts, view.as_is, view.prescribed
    why = nothing_helps(view.all_fp8_loses)
    stays = f" {why[:1].upper()}{why[1:]}: train in BF16." if view.gives_up_fp8 else ""
    saved = if_recorded(saved_ms, as_is, prescribed) if as_is and prescribed else None
    if prescribed is None or saved is None or saved.low <= 0:
        return stays
    if not is_finite(prescribed):
        return f" With all fixes, {' and '.join(prescribed.non_finite or ())} are not finite.{stays}"
    treatments = prescribed.get("treatments", ())
    changes = " and ".join(treatments) or "the changes below"
    measure = if_recorded(fair_bf16, facts, prescribed)
    if measure is None:
        names = " and ".join(sorted(that_help_bf16_too(prescribed.treatments)))
        return (
            f" With {changes}: {in_ms(prescribed.step_ms)}. BF16 would also gain from {names}, which was "
            f"not timed.{stays}"
        )
    same = "the same fixes" if changes_in_bf16(measure.name, measure.treatments) else ""
    too = ALIKE.get(measure.name) or same
    alike = f" with {too} too ({in_ms(measure.step_ms)})" if too else ""
    against = (
        f"within noise of BF16{alike}"
        if if_recorded(is_noise, measure, prescribed, facts.trial)
        else f"{times(measure.step_ms, prescribed.step_ms)} the speed of BF16{alike}"
    )
    return f" With {changes}: {in_ms(prescribed.step_ms)}, {against}.{stays}"


def _most(view: TrialView) -> str:
    """Tell what FP8 can give at most, if that is known."""
    most = view.most
    return (
        f" FP8 can make this step at most about {most.speedup:.2f}x as fast as BF16 on this "
        f"GPU{'' if most.basis == 'measured' else ' (estimated)'}."
        if most
        else ""
    )


def _offer(view: TrialView) -> str:
    trial, bf16, fp8 = view.facts.trial, view.bf16, view.fp8
    if bf16 is None or fp8 is None:
        reasons = {why for each in trial.arms if is_conversion(each.name) and (why := sentence_of(each))}
        return (
            f"The gain from FP8 was not measured: {'; '.join(sorted(reasons))}."
            if reasons
            else "The gain from FP8 was not measured."
        )
    recipe = recipe_of(fp8.name)
    how = "under your own torch.compile" if keeps_users_compilation(fp8.name) else "compiled"
    if view.fp8_is_noise:
        return (
            f"The timing is too noisy to tell whether FP8 ({recipe}, {how}) would be faster: about "
            f"{in_ms(fp8.step_ms)}/step, its best BF16 {in_ms(bf16.step_ms)}.{_disturbed(view)}"
        )
    return (
        f"With FP8 ({recipe}, {how}) the step would take {in_ms(fp8.step_ms)}, "
        f"{times(bf16.step_ms, fp8.step_ms)} the speed of its best BF16 ({in_ms(bf16.step_ms)})."
        f"{_disturbed(view)}"
    )


def _caveat(trial: Trial) -> str:
    caveat = " Timed on a CPU, which does not predict a GPU." if trial.device == "cpu" else ""
    why = stated_doubt(trial)
    return f"{caveat} The timing is unreliable: {why}." if why else caveat
