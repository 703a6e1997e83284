"""What the trial proves: the verdict in measured milliseconds, and for every hypothesis what its treatment really saves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor.facts import Arm, Facts, Trial, recorded
from fp8doctor.finding import Finding, Outcome, Saving
from fp8doctor.interval import Interval, interval
from fp8doctor.report import Status, Verdict

EVEN = 0.03
"""A speedup within this of 1 is called even. A convention of this tool."""

NO_FP8 = "This model uses no FP8. "
"""How the summary of a timed model without FP8 begins."""

STEP_RAISES = "the training step raises "
"""How the reason of a trial begins whose model could be copied and whose own step failed."""

NO_FP8_GEMM = "no FP8 GEMM was seen in its step"
"""The reason of an arm whose FP8 layers ran none; `fp8doctor.trial.conductor` writes it."""


def arm(trial: Trial, name: str) -> Arm | None:
    """The arm of that name, if it was timed."""
    return next((each for each in trial.arms if each.name == name and each.tried), None)


def best_bf16(facts: Facts) -> Arm | None:
    """The fastest BF16 arm of the same model; without FP8 the job as it is counts too."""
    names = ("bf16", "bf16_compiled") if uses_fp8(facts) else ("as_is", "bf16", "bf16_compiled")
    timed = [found for name in names if (found := arm(facts.trial, name))]
    return min(timed, key=lambda each: each.step_ms or 0.0, default=None)


def best_fp8(facts: Facts) -> Arm | None:
    """The fastest FP8 arm, the job as it is included when it runs in FP8."""
    names = [each.name for each in facts.trial.arms if each.name not in ("bf16", "bf16_compiled") and (each.name != "as_is" or uses_fp8(facts))]
    timed = [found for name in names if (found := arm(facts.trial, name))]
    return min(timed, key=lambda each: each.step_ms or 0.0, default=None)


def uses_fp8(facts: Facts) -> bool:
    """Whether a layer of the model is set up for FP8 training."""
    return any(linear.use == "training" for linear in facts.network.linears)


def ratio(a: Arm, b: Arm) -> Interval:
    """Time of ``a`` / time of ``b``, round by round, because a round shares clocks and heat."""
    return interval([x / y for x, y in zip(a.rounds_ms, b.rounds_ms, strict=True)])


def timed(facts: Facts) -> Verdict | None:
    """The measured verdict; None when nothing was timed."""
    if not recorded(facts.trial) or not recorded(facts.network):
        return None
    as_is, bf16 = arm(facts.trial, "as_is"), best_bf16(facts)
    if as_is is None:
        return _without_as_is(facts.trial)
    tokens = facts.workload.tokens if recorded(facts.workload) else None
    accumulate = facts.workload.accumulate if recorded(facts.workload) and recorded(facts.workload.accumulate) else 1
    speed = tokens * accumulate / as_is.step_ms * 1e3 if tokens and as_is.step_ms else None
    fp8 = best_fp8(facts)
    achievable = ratio(bf16, fp8).median if bf16 and fp8 else None
    where = _caveat(facts.trial)
    if not uses_fp8(facts):
        summary = f"{NO_FP8}{_offer(facts.trial, bf16, fp8)}{where}"
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
    summary = f"{now}{_promise(facts.trial, bf16)}{where}"
    return Verdict(
        status=status, summary=summary, speedup=speedup.median, speedup_low=speedup.low, speedup_high=speedup.high, basis="measured",
        achievable_speedup=achievable, step_ms=as_is.step_ms, bf16_step_ms=bf16.step_ms, tokens_per_s=speed,
    )  # fmt: skip


def _without_as_is(trial: Trial) -> Verdict:
    attempted = next((each for each in trial.arms if each.name == "as_is"), None)
    reason = (attempted.reason if attempted else None) or trial.reason or "no time was left"
    if reason == NO_FP8_GEMM:
        return Verdict(status="fp8_not_engaged", summary="FP8 is set up and does not run: not one FP8 GEMM was seen in a training step.", basis="measured")
    return Verdict(status="not_measured", summary=f"The step could not be timed: {reason}.")


def _promise(trial: Trial, bf16: Arm) -> str:
    prescribed = arm(trial, "prescribed")
    if prescribed is None:
        return ""
    return f" With the changes below: {prescribed.step_ms:.1f} ms, {ratio(bf16, prescribed).median:.2f}x of BF16."


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
    as_is = arm(facts.trial, "as_is") if recorded(facts.trial) else None
    if as_is is None:
        return tuple(findings), tuple(outcomes)
    weighed, refuted = [], {}
    for finding in findings:
        alone = next((each for each in facts.trial.arms if finding.treatment and each.tried and each.treatments == (finding.treatment.name,)), None)
        if alone is not None:
            saved = interval([a - b for a, b in zip(as_is.rounds_ms, alone.rounds_ms, strict=True)])
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
