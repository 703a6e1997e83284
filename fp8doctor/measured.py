"""What the trial proves: the verdict in measured milliseconds, and for every hypothesis what its treatment really saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from fp8doctor.ceiling import Ceiling, bound
from fp8doctor.cost import micro_batches
from fp8doctor.facts import Arm, Facts, Trial, recorded
from fp8doctor.finding import Finding, Outcome, Saving
from fp8doctor.interval import Interval, interval
from fp8doctor.verdict import Status, Verdict

EVEN = 0.03
"""A speedup within this of 1 is called even. A convention of this tool."""

NO_FP8 = "This model uses no FP8. "
"""How the summary of a timed model without FP8 begins."""

STEP_RAISES = "the training step raises "
"""How the reason of a trial begins whose model could be copied and whose own step failed."""

NO_TIME_LEFT = "was used up before it"
NOT_EXPECTED_TO_FIT = "would not have been enough for it"
"""How the reason of an arm ends for which the budget left no time."""

NO_FP8_GEMM = "no FP8 GEMM was seen in its step"
"""The reason of an arm whose FP8 layers ran none; `fp8doctor.trial.conductor` writes it."""

PRESCRIBED = "prescribed"
"""The arm of everything together that is prescribed: what findings proposed, and what the trial found beside it."""

FIRST = "_first"
"""Behind the name of an arm that was timed again in the final window: what other arms of the first window are compared with."""

COMBINATION = "combination"
"""Everything that gained, together, where the best of it alone is faster."""


def arm(trial: Trial, name: str) -> Arm | None:
    """The arm of that name, if it was timed."""
    return next((each for each in trial.arms if each.name == name and each.tried), None)


def best_bf16(facts: Facts) -> Arm | None:
    """The fastest BF16 arm of the same model; without FP8 the job as it is counts too."""
    names = ("bf16", "bf16_compiled") if uses_fp8(facts) else ("as_is", "bf16", "bf16_compiled")
    timed = [found for name in names if (found := arm(facts.trial, name))]
    return min(timed, key=lambda each: each.step_ms or 0.0, default=None)


def best_fp8(facts: Facts) -> Arm | None:
    """The fastest total in FP8."""
    return min(fp8_totals(facts), key=lambda each: each.step_ms or 0.0, default=None)


def fp8_totals(facts: Facts) -> list[Arm]:
    """The job as it is and as it is prescribed, or converted where it has no FP8; those that were timed."""
    names = ("as_is", PRESCRIBED) if uses_fp8(facts) else [each.name for each in facts.trial.arms if each.name.startswith("float8_")]
    return [found for name in names if (found := arm(facts.trial, name))]


HELPS_BF16_TOO = frozenset(
    (
        "checkpointing-off",
        "adapters-to-bf16",
        "fused-optimizer",
        "attention-sdpa",
        "fused-attention-on",
        "autocast-bf16",
        "bf16-parameters",
        "larger-batch",
        "cuda-graphs",
    )
)
"""Treatments that are none of FP8's own: BF16 without them is no fair measure of a total that has them. (Every BF16 arm is
compiled where that is faster, and without a KV cache then.)"""


def fair_bf16(facts: Facts, fp8: Arm) -> Arm | None:
    """The best BF16 with those changes of ``fp8`` that are none of FP8's own; None when that was not timed."""
    shared = HELPS_BF16_TOO.intersection(fp8.treatments if uses_fp8(facts) and recorded(fp8.treatments) else ())
    if not shared:
        return best_bf16(facts)
    return arm(facts.trial, "bf16_without_checkpointing") if shared == {"checkpointing-off"} else None


def uses_fp8(facts: Facts) -> bool:
    """Whether a layer of the model is set up for FP8 training."""
    return any(linear.use == "training" for linear in facts.network.linears)


def ratio(a: Arm, b: Arm) -> Interval:
    """Time of ``a`` / time of ``b``, round by round, because a round shares clocks and heat.

    Arms of different windows share none: then the interval is as wide as both of theirs allow.
    """
    if len(a.rounds_ms) == len(b.rounds_ms):
        return interval([x / y for x, y in zip(a.rounds_ms, b.rounds_ms, strict=True)])
    over, under = interval(a.rounds_ms), interval(b.rounds_ms)
    return Interval(median=over.median / under.median, low=over.low / under.high, high=over.high / under.low)


def base_of(trial: Trial, of: Arm) -> Arm | None:
    """The arm that ``of`` changes, if both were timed; recordings from before there was a base change the job as it is."""
    if of.name in ("as_is", "bf16", "bf16_compiled"):
        return None
    name = of.base if recorded(of.base) else "as_is"
    return arm(trial, name) if name else None


def saved_ms(base: Arm, changed: Arm) -> Interval:
    """What a change saves of a step, in ms, round by round."""
    return interval([a - b for a, b in zip(base.rounds_ms, changed.rounds_ms, strict=True)])


def saved_by(facts: Facts, treatment: str) -> Interval | None:
    """What a treatment saved of a step, in ms, where an arm carried it out alone on top of its base; None where none did."""
    for alone in facts.trial.arms if recorded(facts.trial) and recorded(facts.trial.arms) else ():
        base = base_of(facts.trial, alone) if alone.tried and alone.treatments == (treatment,) else None
        if base is not None:
            return saved_ms(base, alone)
    return None


def fp8_pays(facts: Facts) -> bool:
    """Whether a whole step in FP8, as it is or as prescribed, was timed on a GPU and is not slower than the best BF16 of its like."""
    if not recorded(facts.trial) or not recorded(facts.trial.arms) or facts.trial.device == "cpu":
        return False
    ratios = [ratio(bf16, fp8) for fp8 in fp8_totals(facts) if (bf16 := fair_bf16(facts, fp8))]
    return any(each.high >= 1 or each.median > 1 - EVEN for each in ratios)


def waits_for_time(trial: Trial) -> bool:
    """Whether a change was not tried because the budget left no time for it."""
    return any(not each.tried and each.treatments and (each.reason or "").endswith((NO_TIME_LEFT, NOT_EXPECTED_TO_FIT)) for each in trial.arms)


WORTH_WAITING = 1.10
"""Most that FP8 can give, as a ratio to BF16, below which no variant that was left out is waited for. A convention of this tool."""


def stays_in_bf16(facts: Facts) -> Interval | None:
    """What BF16 saves of the best total in FP8, in ms, when FP8 stays slower beyond doubt; None when it does not or is not known.

    It is not known while a variant waits to be tried, unless there is little that any of them could give, nor on a CPU, which
    only emulates FP8.
    """
    if not recorded(facts.trial) or not recorded(facts.network) or not uses_fp8(facts) or facts.trial.device == "cpu":
        return None
    if waits_for_time(facts.trial) and not ((most := ceiling(facts)) and most.speedup < WORTH_WAITING):
        return None
    fp8, bf16 = best_fp8(facts), best_bf16(facts)
    if fp8 is None or bf16 is None or ratio(bf16, fp8).high >= 1:
        return None
    return saved_ms(fp8, bf16)


def ceiling(facts: Facts) -> Ceiling | None:
    """The most that FP8 can give on this GPU over the best BF16; None when that is not known.

    A total that was timed is never above it, whatever the kernels say.
    """
    if not recorded(facts.trial) or not recorded(facts.network) or facts.trial.device == "cpu":
        return None
    bf16, totals = best_bf16(facts), fp8_totals(facts)
    found = bound(facts, bf16, [each for each in totals if fair_bf16(facts, each) is bf16]) if bf16 else None
    if found is None:
        return None
    reached = [ratio(measure, each).median for each in totals if (measure := fair_bf16(facts, each))]
    return dataclasses.replace(found, speedup=max(found.speedup, *reached)) if reached else found


def timed(facts: Facts) -> Verdict | None:
    """The measured verdict; None when nothing was timed."""
    if not recorded(facts.trial) or not recorded(facts.network):
        return None
    as_is, bf16 = arm(facts.trial, "as_is"), best_bf16(facts)
    if as_is is None:
        return _without_as_is(facts.trial, bf16)
    tokens = facts.workload.tokens if recorded(facts.workload) else None
    accumulate = micro_batches(facts)
    speed = tokens * accumulate / as_is.step_ms * 1e3 if tokens and as_is.step_ms else None
    fp8 = best_fp8(facts)
    measure = fair_bf16(facts, fp8) if fp8 else None
    achievable = ratio(measure, fp8).median if measure and fp8 else None
    where = _caveat(facts.trial)
    if not uses_fp8(facts):
        summary = f"{NO_FP8}{_offer(facts.trial, bf16, fp8)}{_most(facts)}{where}"
        return Verdict(
            status="no_fp8", summary=summary, basis="measured", achievable_speedup=achievable, step_ms=as_is.step_ms,
            bf16_step_ms=bf16.step_ms if bf16 else None, tokens_per_s=speed,
        )  # fmt: skip
    if bf16 is None:
        reason = next((each.reason for each in facts.trial.arms if each.name == "bf16"), None) or "it was not tried"
        return Verdict(
            status="not_measured", summary=f"FP8 takes {as_is.step_ms:.1f} ms a step. No BF16 baseline could be timed: {reason}.{where}",
            basis="measured", step_ms=as_is.step_ms, tokens_per_s=speed,
        )  # fmt: skip
    speedup = ratio(bf16, as_is)
    even = speedup.low <= 1 <= speedup.high or abs(speedup.median - 1) < EVEN
    status: Status = "fp8_even" if even else "fp8_slower" if speedup.median < 1 else "fp8_faster"
    rate = f" ({speed:,.0f} tokens/s)" if speed else ""
    now = f"FP8 runs at {speedup.median:.2f}x of BF16: {as_is.step_ms:.1f} ms a step{rate}, best BF16 {bf16.step_ms:.1f} ms."
    summary = f"{now}{_promise(facts)}{_most(facts)}{where}"
    return Verdict(
        status=status, summary=summary, speedup=speedup.median, speedup_low=speedup.low, speedup_high=speedup.high, basis="measured",
        achievable_speedup=achievable, step_ms=as_is.step_ms, bf16_step_ms=bf16.step_ms, tokens_per_s=speed,
    )  # fmt: skip


def _without_as_is(trial: Trial, bf16: Arm | None) -> Verdict:
    attempted = next((each for each in trial.arms if each.name == "as_is"), None)
    reason = (attempted.reason if attempted else None) or trial.reason or "no time was left"
    if reason == NO_FP8_GEMM:
        running = arm(trial, PRESCRIBED) or arm(trial, "te-autocast")
        gives = f" Once it runs: {running.step_ms:.1f} ms, {ratio(bf16, running).median:.2f}x of BF16." if running and bf16 else ""
        summary = f"FP8 is set up and does not run: not one FP8 GEMM was seen in a training step.{gives}"
        return Verdict(status="fp8_not_engaged", summary=summary, basis="measured")
    return Verdict(status="not_measured", summary=f"The step could not be timed: {reason}.")


def _promise(facts: Facts) -> str:
    """What the plan gives, or that nothing that was tried makes FP8 as fast as BF16."""
    prescribed, as_is = arm(facts.trial, PRESCRIBED), arm(facts.trial, "as_is")
    stays = " Nothing that was tried makes FP8 as fast: stay in BF16." if stays_in_bf16(facts) else ""
    if prescribed is None or as_is is None or saved_ms(as_is, prescribed).low <= 0:
        return stays
    measure, changes = fair_bf16(facts, prescribed), " and ".join(prescribed.treatments if recorded(prescribed.treatments) else ()) or "the changes below"
    if measure is None:
        names = " and ".join(sorted(HELPS_BF16_TOO.intersection(prescribed.treatments)))
        return f" With {changes}: {prescribed.step_ms:.1f} ms. BF16 would gain from {names} too, which was not timed.{stays}"
    alike = f" with checkpointing off too ({measure.step_ms:.1f} ms)" if measure.name == "bf16_without_checkpointing" else ""
    return f" With {changes}: {prescribed.step_ms:.1f} ms, {ratio(measure, prescribed).median:.2f}x of BF16{alike}.{stays}"


def _most(facts: Facts) -> str:
    """What FP8 can give at most, where that is known."""
    most = ceiling(facts)
    return f" FP8 cannot give this step more than about {most.speedup:.2f}x on this GPU{'' if most.basis == 'measured' else ' (modelled)'}." if most else ""


def _offer(trial: Trial, bf16: Arm | None, fp8: Arm | None) -> str:
    if bf16 is None or fp8 is None:
        reasons = {each.reason for each in trial.arms if each.name.startswith("float8") and each.reason}
        return f"What FP8 would give was not measured: {'; '.join(sorted(reasons))}." if reasons else "What FP8 would give was not measured."
    recipe = fp8.name.removeprefix("float8_")
    gain = ratio(bf16, fp8).median
    return f"With FP8 ({recipe}, compiled) the step would take {fp8.step_ms:.1f} ms, {gain:.2f}x of its best BF16 ({bf16.step_ms:.1f} ms)."


def _caveat(trial: Trial) -> str:
    caveat = " Timed on a CPU, which says nothing about a GPU." if trial.device == "cpu" else ""
    return f"{caveat} The timing is unreliable: {trial.reason}." if trial.reliable is False and trial.reason else caveat


def measured(facts: Facts, findings: Sequence[Finding], outcomes: Sequence[Outcome]) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """The findings with measured savings where an arm carried out their treatment alone, and the refuted ones so called.

    A refuted finding keeps its saving, zero or negative, and becomes information.
    """
    if not recorded(facts.trial):
        return tuple(findings), tuple(outcomes)
    weighed, refuted = [], {}
    for finding in findings:
        saved = _saved_alone(facts, finding)
        if saved is not None:
            saving = Saving(low=saved.low, high=saved.high, basis="measured", gpu=facts.trial.gpu or facts.trial.device.upper())
            finding = msgspec.structs.replace(finding, saving_ms=saving)
            if saved.high <= 0:
                finding = msgspec.structs.replace(finding, severity="info")
                refuted[finding.code] = f"measured: {finding.treatment.name if finding.treatment else ''} costs {-saved.median:.1f} ms a step instead of saving"
        weighed.append(finding)
    judged = tuple(
        msgspec.structs.replace(outcome, outcome="refuted", reason=refuted[outcome.code]) if outcome.code in refuted else outcome for outcome in outcomes
    )
    return tuple(weighed), judged


def _saved_alone(facts: Facts, finding: Finding) -> Interval | None:
    """What the treatment of a finding saved where an arm carried it out alone on top of its base; None where none did.

    A finding of a measured check brings its own. BF16 is held to the best that FP8 reaches: what else is saved is the other treatments' gain.
    """
    if finding.treatment is None or (finding.saving_ms is not None and finding.saving_ms.basis == "measured"):
        return None
    if finding.treatment.name == "stay-in-bf16":
        fp8, bf16 = best_fp8(facts) if uses_fp8(facts) else None, best_bf16(facts)
        return saved_ms(fp8, bf16) if fp8 and bf16 else None
    return saved_by(facts, finding.treatment.name)
