"""Engagement of FP8: converted layers, and obstacles to running in FP8."""

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import converted_nothing
from fp8doctor.analysis.layers import computes_forward_in_fp8, nothing_to_convert, stores_fp8
from fp8doctor.analysis.own_step import outside_autocast, ran_in_fp8
from fp8doctor.facts import Facts, Unrecorded, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.wording import plural


def why_not_engaged(facts: Facts) -> str:
    """Say why no layer trains in FP8, or why that is unknown; empty if one does."""
    if not recorded(facts, "network"):
        return "No model was examined, so fp8doctor cannot tell whether FP8 is engaged."
    try:
        if uses_fp8(facts):
            if not (why := why_fp8_does_not_run(facts)) and ran_in_fp8(facts) is None:
                outside_autocast(facts)
            return why
        took = ": the filter of the conversion took none" if converted_nothing(facts) else ""
        count = plural(len(facts.network.linears), "Linear")
        state = without_fp8(facts)[0] or f"No layer of this model trains in FP8 (0 of {count}{took})"
        return f"{state}. To convert it, see 'fp8doctor explain MOD001'."
    except Unrecorded as missing:
        gap = str(facts.get("gaps", {}).get("training.fp8_autocast", "")).rstrip(".")
        return f"fp8doctor cannot tell whether FP8 is engaged: {gap or missing}."


def why_fp8_does_not_run(facts: Facts) -> str:
    """Say what prevents every FP8 layer from running in FP8; empty if unknown."""
    in_fp8, ran = facts.network.fp8, ran_in_fp8(facts)
    if facts.network.get("trainable_parameters") == 0:
        return "FP8 trains nothing: no parameter is trained."
    if all(linear.get("engaged") is False for linear in in_fp8):
        return f"FP8 does not run: all {len(in_fp8)} FP8 layers ran their last training forward in BF16."
    if ran is False:
        return "FP8 is set up and does not run: no FP8 matmul was seen in a training step."
    if ran is None and if_recorded(outside_autocast, facts):
        return f"FP8 does not run: the training step opens no FP8 autocast around {len(in_fp8)} FP8 layers."
    return ""


def without_fp8(facts: Facts) -> tuple[str, bool]:
    """Say what a model has in place of FP8 layers, and whether FP8 may run all the same, at unknown speed.

    The words are empty for plain BF16.
    """
    linears = facts.network.linears
    if uses_fp8(facts):
        return "", False
    forward = sum(map(computes_forward_in_fp8, linears))
    stored, named = (sum(each.use == use for each in linears) for use in ("storage", "unknown"))
    calls, ran = facts.network.get("fp8_calls", ()), facts.get("observed.fp8_gemms")
    unread = facts.get("gaps", {}).get("network.linears", "").rstrip(".") if not linears else ""
    kind, of = "FP8" if any(map(stores_fp8, linears)) else "low precision", f"of {len(linears)} Linears"
    states = (
        (forward, f"No FP8 training: {forward} {of} multiply in FP8 in the forward only", False),
        (unread, f"Its Linears could not be read: {unread}", True),
        (named, f"FP8 of no known library in {named} {of}: whether it runs was not seen", True),
        (calls, f"FP8 is outside of layers: the code calls {''.join(calls[:1])}", True),
        (ran, f"{ran} FP8 matmuls ran in a step, and no layer of a known FP8 library was found", True),
        (stored, f"No FP8 training: {stored} {of} only store their weights in {kind}", False),
        (
            if_recorded(nothing_to_convert, facts.network),
            "FP8 takes none of its layers: train in BF16",
            False,
        ),
    )
    return next(((words, unclear) for holds, words, unclear in states if holds), ("", False))


def invalidates(finding: Finding) -> bool:
    """Return whether a finding says that the modelled step is not the one that runs.

    Compile marks without effect do not count if the facts call no layer compiled.
    """
    if finding.get("breaks") == "step_raises":
        return True
    check = registry.check_of(finding)
    seems = finding.severity == "info" or finding.evidence.get("examined_as_uncompiled") is True
    return check is not None and check.invalidates_model and not seems
