"""The verdict: what a report answers first, measured where there was a trial, else from the facts alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fp8doctor import registry
from fp8doctor.analysis.arms import (
    arm,
    best_bf16,
    best_fp8,
    fair_bf16,
    left_out_bf16,
    ratio,
    saved_ms,
    uses_fp8,
)
from fp8doctor.analysis.fp8_request import converted_nothing, fp8_was_asked_for, of_converter
from fp8doctor.analysis.layers import flops_share_pct, layer_label, shares_are_known
from fp8doctor.analysis.loss_gap import loss_gap, loss_in_words, non_finite_from
from fp8doctor.analysis.modelled_speedup import beside_timed_step, modelled_speedup
from fp8doctor.analysis.outcome import (
    MeasuredSpeed,
    Speed,
    ceiling,
    fp8_never_ran,
    is_noise,
    measured_speed,
    never_ran_in_script,
    stays_in_bf16,
    swallows_effect,
    watched_job,
)
from fp8doctor.analysis.rank_comparison import slowest_first
from fp8doctor.analysis.script_overhead import script_overhead
from fp8doctor.analysis.treatment_table import that_help_bf16_too
from fp8doctor.analysis.waiting import waiting_first
from fp8doctor.cost import micro_batches, step_tokens
from fp8doctor.diagnosis.answer import Verdict, before_speed
from fp8doctor.facts import Arm, Facts, Linear, Trial, Unrecorded, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    BF16_BASELINES,
    ArmName,
    is_conversion,
    keeps_users_compilation,
    recipe_of,
)
from fp8doctor.facts.paths import path_of
from fp8doctor.finding import Finding
from fp8doctor.wording import in_ms, plural, times


def verdict(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Give the answer, and before it what the steps of a watched script, or its ranks, wait for."""
    answer = before_speed(_of_precision(facts, findings), facts, findings)
    told = filter(None, (if_recorded(each, facts) for each in (waiting_first, script_overhead)))
    first = " ".join(told) or if_recorded(slowest_first, facts)
    return msgspec.structs.replace(answer, summary=f"{first} {answer.summary}") if first else answer


def _of_precision(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Give the measured verdict, else the expected one. FP8 that was asked for and is missing stays so."""
    try:
        measured = measured_verdict(facts, findings)
        if measured is not None and measured.status != "no_fp8":
            return measured
        expected = expected_verdict(facts, findings)
    except Unrecorded as missing:
        return Verdict(status="not_measured", summary=f"No verdict: {path_of(missing)} was not recorded.")
    if measured is None:
        return expected
    if expected.status == "fp8_not_engaged" or _named(facts.network.linears):
        return msgspec.structs.replace(
            measured,
            status=expected.status,
            summary=f"{expected.summary} {measured.summary.removeprefix(NO_FP8)}",
        )
    return measured


def expected_verdict(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Give the verdict that facts alone allow; nothing in it is measured."""
    if not recorded(facts, "network"):
        reason = facts.gaps.get("network") if recorded(facts, "gaps") else None
        return Verdict(
            status="not_measured",
            summary=f"No model was examined: {reason.rstrip('.')}." if reason else "No model was examined.",
        )
    if uses_fp8(facts):
        return _set_up(facts, findings)
    if ran := _ran_in_script(facts):
        return Verdict(
            status="not_measured",
            summary=f"No layer of a known FP8 library was found, yet {ran}. Whether FP8 is faster than BF16 "
            "was not measured.",
        )
    asked = fp8_was_asked_for(facts) or converted_nothing(facts)
    grave = next((each for each in findings if each.severity == "error" and each.area in KEEPS_FP8_OUT), None)
    if grave and asked:
        return Verdict(status="fp8_not_engaged", summary=f"FP8 does not run: {grave.title.rstrip('.')}.")
    linears = facts.network.linears
    if named := _named(linears):
        return Verdict(status="not_measured", summary=_by_name(named, linears))
    stored = sum(linear.use == "storage" for linear in linears)
    if stored:
        return Verdict(
            status="no_fp8",
            summary=f"No FP8 training: {stored} of {len(linears)} Linears only store their weights in "
            "low precision.",
        )
    if asked:
        return Verdict(
            status="no_fp8", summary="FP8 was asked for; this model holds no FP8 layer, or none yet."
        )
    return Verdict(status="no_fp8", summary=f"This model uses no FP8{_and_none_asked(facts)}.")


def _and_none_asked(facts: Facts) -> str:
    """Say that nobody asked for FP8, as far as that is known."""
    converter = of_converter(facts)
    if converter is None or (converter.called is False and not converter.named):
        return ", and none was asked for"
    if converter.called is None:
        return "; no setting asks for it, and whether a converter was called on it was not seen"
    if converter.called:
        return ": another model was converted"
    return ": its code calls a converter somewhere, and that call has not run"


def _named(linears: Sequence[Linear]) -> list[Linear]:
    """List layers that are FP8 by name, where nothing shows what they multiply in."""
    return [linear for linear in linears if linear.use == "unknown"]


def _by_name(named: Sequence[Linear], linears: Sequence[Linear]) -> str:
    """Say that layers are FP8 by their name alone."""
    some, first = f"{len(named)} of {plural(len(linears), 'Linear')}", layer_label(named[0])
    return (
        f"FP8 by name in {some} ({first}), a class of no known FP8 library. Its code shows no FP8 GEMM of "
        "torch's; whether FP8 runs was not seen."
    )


def _ran_in_script(facts: Facts) -> str:
    """Say that FP8 GEMMs ran in the profiled step of a watched script; empty where none was seen."""
    count = facts.observed.fp8_gemms if recorded(facts, "observed.fp8_gemms") else None
    return f"{plural(count, 'FP8 GEMM')} ran in a step of {watched_job(facts)}" if count else ""


KEEPS_FP8_OUT = ("environment", "engagement")
"""Areas in which an error is the reason why a model that was to train in FP8 holds no FP8 layer."""


def _set_up(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Say what is expected of a model that holds FP8 layers."""
    linears = facts.network.linears
    in_fp8 = [linear for linear in linears if linear.use == "training"]
    if all(recorded(linear, "engaged") and linear.engaged is False for linear in in_fp8):
        return Verdict(
            status="fp8_not_engaged",
            summary=f"FP8 does not run: all {len(in_fp8)} FP8 layers ran their last training "
            "forward in BF16.",
        )
    if never_ran_in_script(facts):
        return Verdict(
            status="fp8_not_engaged",
            summary="FP8 is set up and does not run: not one FP8 GEMM was seen in a step of "
            f"{watched_job(facts)}.",
            basis="measured",
        )
    ran = _ran_in_script(facts)
    expects = if_recorded(modelled_speedup, facts) if is_what_it_seems(findings) else None
    share = f" ({flops_share_pct(in_fp8, facts):.0f} % of the GEMM FLOPs)" if shares_are_known(facts) else ""
    setup = f"{len(in_fp8)} of {len(linears)} Linears{share}"
    return Verdict(
        status="not_measured",
        summary=f"FP8 is set up in {setup}{f', and {ran}' if ran else ''}. Whether it is faster than BF16 "
        f"was not measured.{f' {expects.sentence}' if expects else ''}",
        achievable_speedup=max(expects.as_is, expects.compiled) if expects else None,
        basis="modelled" if expects else None,
    )


def is_what_it_seems(findings: Iterable[Finding]) -> bool:
    """Whether a model of the step is one of what runs: no disease that says otherwise was found."""
    invalid = {check.code for check in registry.discover() if check.invalidates_model}
    return not any(each.code in invalid and each.severity != "info" for each in findings)


NO_FP8 = "This model uses no FP8. "
"""How the summary of a timed model without FP8 begins."""


def measured_verdict(facts: Facts, findings: Sequence[Finding] = ()) -> Verdict | None:
    """Give the verdict of a trial; None when nothing was timed.

    ``findings`` say whether a baseline that is missing can be modelled.
    """
    if not recorded(facts, "trial") or not recorded(facts, "network"):
        return None
    as_is, bf16 = arm(facts.trial, ArmName.AS_IS), best_bf16(facts)
    if as_is is None:
        return _without_as_is(facts.trial, bf16)
    if not uses_fp8(facts):
        return _without_fp8(facts, as_is, bf16)
    tokens_per_s = _tokens_per_s(facts, as_is)
    measured = measured_speed(facts)
    if measured is None:
        return _without_bf16(facts, as_is, is_what_it_seems(findings))
    rate = f" ({tokens_per_s:,.0f} tokens/s)" if tokens_per_s else ""
    noisy = measured.status == "too_noisy"
    now = _too_noisy(measured, rate) if noisy else _speed(measured, rate)
    return Verdict(
        status=measured.status,
        summary=f"{now}{_promise(facts)}{'' if noisy else _most(facts)}{_loss(facts.trial)}"
        f"{_caveat(facts.trial)}",
        speedup=None if noisy else measured.speedup.median,
        speedup_low=measured.speedup.low,
        speedup_high=measured.speedup.high,
        basis="measured",
        achievable_speedup=_achievable(facts),
        step_ms=as_is.step_ms,
        bf16_step_ms=measured.bf16.step_ms,
        tokens_per_s=tokens_per_s,
    )


def _speed(measured: MeasuredSpeed, rate: str) -> str:
    ms, bf16_ms = measured.as_is.step_ms, measured.bf16.step_ms
    return f"FP8 runs at {times(bf16_ms, ms)} of BF16: {in_ms(ms)} a step{rate}, best BF16 {in_ms(bf16_ms)}."


def _too_noisy(measured: MeasuredSpeed, rate: str) -> str:
    """Say that the timing does not tell whether FP8 is faster, and what keeps it from telling."""
    speedup, rounds = measured.speedup, plural(len(measured.as_is.rounds_ms), "round")
    why = (
        f"BF16's time divided by FP8's lies between {speedup.low:.2f} and {speedup.high:.2f} over {rounds}"
        if swallows_effect(speedup)
        else "they are no further apart than a step and its own copy"
    )
    return (
        f"The timing is too noisy to tell whether FP8 is faster than BF16: {why}. FP8 takes about "
        f"{in_ms(measured.as_is.step_ms)} a step{rate}, the best BF16 {in_ms(measured.bf16.step_ms)}."
    )


EVEN_WHEN_MODELLED = 0.15
"""A modelled speedup within this of 1 is called even: those of seven timed jobs are at most so far off
(`tests/analysis/test_modelled_speedup.py`)."""


def _without_bf16(facts: Facts, as_is: Arm, can_be_modelled: bool) -> Verdict:
    """Hold the step that was timed to a modelled BF16, where there is a model of it; it is no slower than a
    BF16 that was timed."""
    assert as_is.step_ms is not None
    bf16 = best_bf16(facts)
    missing = left_out_bf16(facts) or next(
        (each for each in facts.trial.arms if each.name in BF16_BASELINES), None
    )
    why = missing.reason if missing else "it was not tried"
    timed = (
        f"FP8 takes {in_ms(as_is.step_ms)} a step. No BF16 baseline could be timed: {why}."
        if bf16 is None or bf16.step_ms is None
        else f"FP8 takes {in_ms(as_is.step_ms)} a step, and BF16 {in_ms(bf16.step_ms)}, which may be faster "
        f"compiled. That was not timed: {why}."
    )
    expects = if_recorded(beside_timed_step, facts) if can_be_modelled else None
    answer = Verdict(
        status="not_measured",
        summary=f"{timed}{_caveat(facts.trial)}",
        basis="measured",
        step_ms=as_is.step_ms,
        tokens_per_s=_tokens_per_s(facts, as_is),
    )
    if expects is None:
        return answer
    speedup = min(expects.as_is, bf16.step_ms / as_is.step_ms if bf16 and bf16.step_ms else expects.as_is)
    bf16_ms = as_is.step_ms * speedup
    status: Speed = "fp8_slower" if speedup < 1 else "fp8_faster"
    return msgspec.structs.replace(
        answer,
        status="fp8_even" if abs(speedup - 1) < EVEN_WHEN_MODELLED else status,
        summary=f"{timed} The best BF16 would take about {in_ms(bf16_ms)}, so that FP8 runs at about "
        f"{speedup:.2f}x of it (modelled on {expects.gpu}).{_caveat(facts.trial)}",
        basis="modelled",
        speedup=speedup,
        bf16_step_ms=bf16_ms,
        achievable_speedup=max(speedup, expects.compiled),
    )


def _tokens_per_s(facts: Facts, as_is: Arm) -> float | None:
    """Compute the tokens of a whole step, with all its micro-batches, by its time."""
    tokens = step_tokens(facts)
    return tokens * micro_batches(facts) / as_is.step_ms * 1e3 if tokens and as_is.step_ms else None


def _achievable(facts: Facts) -> float | None:
    """Tell the speedup of the best step in FP8 over the BF16 of its like, where both were timed."""
    fp8 = best_fp8(facts)
    measure = fair_bf16(facts, fp8) if fp8 else None
    if measure is None or fp8 is None or is_noise(speedup := ratio(measure, fp8), facts.trial):
        return None
    return speedup.median


def _without_fp8(facts: Facts, as_is: Arm, bf16: Arm | None) -> Verdict:
    offer = _offer(facts.trial, bf16, best_fp8(facts))
    return Verdict(
        status="no_fp8",
        summary=f"{NO_FP8}{offer}{_most(facts)}{_caveat(facts.trial)}",
        basis="measured",
        achievable_speedup=_achievable(facts),
        step_ms=as_is.step_ms,
        bf16_step_ms=bf16.step_ms if bf16 else None,
        tokens_per_s=_tokens_per_s(facts, as_is),
    )


def _without_as_is(trial: Trial, bf16: Arm | None) -> Verdict:
    if fp8_never_ran(trial):
        running = arm(trial, ArmName.PRESCRIBED) or arm(trial, "te-autocast")
        gives = (
            f" Once it runs: {in_ms(running.step_ms)}, {times(bf16.step_ms, running.step_ms)} of BF16."
            if running and bf16
            else ""
        )
        summary = f"FP8 is set up and does not run: not one FP8 GEMM was seen in a training step.{gives}"
        return Verdict(status="fp8_not_engaged", summary=summary, basis="measured")
    attempted = next((each.reason for each in trial.arms if each.name == ArmName.AS_IS), None)
    reason = attempted or trial.reason or "no time was left"
    return Verdict(status="not_measured", summary=f"The step could not be timed: {reason}.")


def _promise(facts: Facts) -> str:
    """Say what the plan gives, or that nothing that was tried makes FP8 as fast as BF16."""
    prescribed, as_is = arm(facts.trial, ArmName.PRESCRIBED), arm(facts.trial, ArmName.AS_IS)
    stays = " Nothing that was tried makes FP8 as fast: stay in BF16." if stays_in_bf16(facts) else ""
    if prescribed is None or as_is is None or saved_ms(as_is, prescribed).low <= 0:
        return stays
    measure, changes = (
        fair_bf16(facts, prescribed),
        " and ".join(prescribed.treatments if recorded(prescribed, "treatments") else ())
        or "the changes below",
    )
    if measure is None:
        names = " and ".join(sorted(that_help_bf16_too(prescribed.treatments)))
        return (
            f" With {changes}: {in_ms(prescribed.step_ms)}. BF16 would gain from {names} too, which was "
            f"not timed.{stays}"
        )
    alike = (
        f" with checkpointing off too ({in_ms(measure.step_ms)})"
        if measure.name == ArmName.BF16_WITHOUT_CHECKPOINTING
        else ""
    )
    speedup = ratio(measure, prescribed)
    against = (
        f"too close to BF16{alike} for this timing to tell them apart"
        if is_noise(speedup, facts.trial)
        else f"{times(measure.step_ms, prescribed.step_ms)} of BF16{alike}"
    )
    return f" With {changes}: {in_ms(prescribed.step_ms)}, {against}.{stays}"


def _most(facts: Facts) -> str:
    """Tell what FP8 can give at most, where that is known."""
    most = if_recorded(ceiling, facts)
    return (
        f" FP8 cannot give this step more than about {most.speedup:.2f}x on this "
        f"GPU{'' if most.basis == 'measured' else ' (modelled)'}."
        if most
        else ""
    )


def _loss(trial: Trial) -> str:
    """Warn of an FP8 that does not learn what BF16 does; where it does, the table of times says so."""
    gap = if_recorded(loss_gap, trial)
    return f" {loss_in_words(trial)}" if (gap and gap.is_far) or non_finite_from(trial) else ""


def _offer(trial: Trial, bf16: Arm | None, fp8: Arm | None) -> str:
    if bf16 is None or fp8 is None:
        reasons = {each.reason for each in trial.arms if is_conversion(each.name) and each.reason}
        return (
            f"What FP8 would give was not measured: {'; '.join(sorted(reasons))}."
            if reasons
            else "What FP8 would give was not measured."
        )
    recipe, gain = recipe_of(fp8.name), ratio(bf16, fp8)
    how = "under your own torch.compile" if keeps_users_compilation(fp8.name) else "compiled"
    if is_noise(gain, trial):
        return (
            f"The timing is too noisy to tell whether FP8 ({recipe}, {how}) would be faster: about "
            f"{in_ms(fp8.step_ms)} a step, its best BF16 {in_ms(bf16.step_ms)}."
        )
    return (
        f"With FP8 ({recipe}, {how}) the step would take {in_ms(fp8.step_ms)}, "
        f"{times(bf16.step_ms, fp8.step_ms)} of its best BF16 ({in_ms(bf16.step_ms)})."
    )


def _caveat(trial: Trial) -> str:
    caveat = " Timed on a CPU, which says nothing about a GPU." if trial.device == "cpu" else ""
    return (
        f"{caveat} The timing is unreliable: {trial.reason}."
        if trial.reliable is False and trial.reason
        else caveat
    )
