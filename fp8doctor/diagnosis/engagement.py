"""Engagement of FP8: converted layers, and obstacles to running in FP8."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import converted_nothing
from fp8doctor.analysis.outcome import fp8_never_ran, never_ran_in_script, outside_autocast, watched_job
from fp8doctor.facts import Facts, Unrecorded, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, Outcome
from fp8doctor.wording import plural


def why_not_engaged(facts: Facts) -> str:
    """Say why no layer trains in FP8, or why that is unknown; empty if one does."""
    if not recorded(facts, "network"):
        return "No model was examined, so fp8doctor cannot tell whether FP8 is engaged."
    try:
        if uses_fp8(facts):
            return why_fp8_does_not_run(facts) or _why_unknown(facts)
        return _without_fp8_layers(facts)
    except Unrecorded as missing:
        return f"fp8doctor cannot tell whether FP8 is engaged: {missing}."


def _without_fp8_layers(facts: Facts) -> str:
    """Say why a model has no layer that is set up for FP8, as far as that is known."""
    linears = facts.network.linears
    count = plural(len(linears), "Linear")
    if not linears and (unread := _gap(facts, "network.linears")):
        return f"fp8doctor cannot tell whether FP8 is engaged: {unread}."
    if by_name := sum(linear.use == "unknown" for linear in linears):
        return f"fp8doctor cannot tell whether FP8 is engaged: {by_name} of {count} have an unknown class."
    took = ": the filter of the conversion took none" if converted_nothing(facts) else ""
    return (
        f"No layer of this model trains in FP8 (0 of {count}{took}). To convert it, see "
        "'fp8doctor explain MOD001'."
    )


def why_fp8_does_not_run(facts: Facts) -> str:
    """Say what prevents every FP8 layer from running in FP8; empty if unknown."""
    in_fp8 = facts.network.fp8
    if all(linear.get("engaged") is False for linear in in_fp8):
        return f"FP8 does not run: all {len(in_fp8)} FP8 layers ran their last training forward in BF16."
    if never_ran_in_script(facts):
        return f"FP8 is set up and does not run: no FP8 matmul was seen in a step of {watched_job(facts)}."
    if recorded(facts, "trial") and fp8_never_ran(facts.trial):
        return "FP8 is set up and does not run: no FP8 matmul was seen in a training step."
    if not fp8_ran(facts) and if_recorded(outside_autocast, facts):
        return f"FP8 does not run: the training step opens no FP8 autocast around {len(in_fp8)} FP8 layers."
    return ""


def fp8_ran(facts: Facts) -> bool:
    """Return whether FP8 matmuls were seen in a step, watched or in a trial."""
    if facts.get("observed.fp8_gemms"):
        return True
    as_is = (each for each in facts.arms() if each.name == ArmName.AS_IS and each.tried)
    return any(each.get("fp8_gemms") for each in as_is)


def _why_unknown(facts: Facts) -> str:
    """Say why nobody knows of an FP8 autocast around layers that need one; else empty."""
    try:
        outside_autocast(facts)
    except Unrecorded:
        why = _gap(facts, "training.fp8_autocast")
        told = f": {why}" if why else ""
        return "" if fp8_ran(facts) else f"fp8doctor cannot tell whether FP8 is engaged{told}."
    return ""


def _gap(facts: Facts, fact: str) -> str:
    return str(facts.get("gaps", {}).get(fact, "")).rstrip(".")


CAUSE = "GPU001"
IN_BF16_TOO = ("layers_do_not_learn", "not_finite")
"""What a finding about FP8 may say of a step without it."""


def without_its_symptoms(
    findings: Sequence[Finding], outcomes: Sequence[Outcome]
) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Drop findings about FP8 if the GPU, or all of them, make an FP8 step raise."""
    if not any(each.code == CAUSE and recorded(each, "breaks") for each in findings):
        return tuple(findings), tuple(outcomes)
    of_fp8 = {check.name for check in registry.discover() if check.changes_fp8}
    left = [each for each in findings if each.name not in of_fp8 or each.get("breaks") in IN_BF16_TOO]
    dropped = {each.code for each in findings}.difference(each.code for each in left)
    reason = f"no FP8 step runs on this GPU ({CAUSE})"
    return (
        tuple(
            msgspec.structs.replace(
                each, caused_by=tuple(code for code in each.caused_by if code not in dropped)
            )
            for each in left
        ),
        tuple(
            msgspec.structs.replace(each, outcome="not_applicable", reason=reason)
            if each.code in dropped
            else each
            for each in outcomes
        ),
    )


def invalidates(finding: Finding) -> bool:
    """Return whether a finding says that the modelled step is not the one that runs.

    Compile marks without effect do not count if the facts call no layer compiled.
    """
    if finding.get("breaks") == "step_raises":
        return True
    check = registry.check_of(finding)
    seems = finding.severity == "info" or finding.evidence.get("examined_as_uncompiled") is True
    return check is not None and check.invalidates_model and not seems
