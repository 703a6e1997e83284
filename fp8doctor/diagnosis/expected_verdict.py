"""The verdict that facts alone allow, if nothing was timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.analysis.arms import timed_on_cpu, uses_fp8
from fp8doctor.analysis.fp8_request import (
    asked_by_argument,
    converted_a_copy,
    converted_nothing,
    fp8_was_asked_for,
    of_converter,
    trains_in_16_bits,
)
from fp8doctor.analysis.known_form import runs_in_fp32
from fp8doctor.analysis.layers import (
    computes_forward_in_fp8,
    flops_share_pct,
    layer_label,
    nothing_to_convert,
    rehearses_quantization,
    shares_are_known,
    stores_fp8,
)
from fp8doctor.analysis.modelled_speedup import (
    ModelledSpeedup,
    modelled_conversion,
    modelled_speedup,
)
from fp8doctor.analysis.no_estimate import NoEstimate, unknown_part
from fp8doctor.analysis.outcome import never_ran_in_script, watched_job
from fp8doctor.analysis.watched_speedup import beside_its_run
from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.diagnosis.engagement import why_fp8_does_not_run, why_not_engaged
from fp8doctor.facts import Facts, Linear, Unrecorded, if_recorded, recorded
from fp8doctor.facts.paths import path_of
from fp8doctor.finding import Basis, Finding
from fp8doctor.wording import plural

IN_FP32 = "Its matmuls are in fp32: its weights are, and no autocast is on"

FAILED_EARLY = "The script failed before its first step"


def failed_early(facts: Facts) -> bool:
    """Return whether a script failed before its first step; an older recording holds no exception."""
    reason = facts.get("gaps", {}).get("network", "")
    return bool(facts.get("script_error")) or FAILED_EARLY.lower() == reason.lower()


def rank_failed(facts: Facts) -> bool:
    """Return whether a process of the job raised, or was killed."""
    processes = facts.ranks.processes if recorded(facts, "ranks") else ()
    return any(each.get("end") in ("raised", "killed") for each in processes)


def expected_verdict(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Give the verdict that facts alone allow; nothing in it is measured."""
    if error := facts.get("script_error"):
        return Verdict(status="not_measured", summary=f"{FAILED_EARLY}: {error.rstrip('.')}.")
    if not recorded(facts, "network"):
        reason = facts.get("gaps", {}).get("network")
        return Verdict(
            status="not_measured",
            summary=f"No model was examined: {reason.rstrip('.')}." if reason else "No model was examined.",
        )
    if uses_fp8(facts):
        return _set_up(facts, findings)
    computing = any(map(computes_forward_in_fp8, facts.network.linears))
    outside = fp8_outside_layers(facts)
    if outside and _ran_in_script(facts):
        return Verdict(status="not_measured", summary=outside)
    if _ran_in_script(facts):
        told = short_of_training(facts)
        if computing:
            return Verdict(status="no_fp8", summary=told)
        return Verdict(
            status="not_measured", summary=f"{told} Whether FP8 is faster than BF16 was not measured."
        )
    asked = (
        fp8_was_asked_for(facts)
        or converted_nothing(facts)
        or asked_by_argument(facts)
        or if_recorded(converted_a_copy, facts)
    )
    grave = next((each for each in findings if each.severity == "error" and each.area in KEEPS_FP8_OUT), None)
    if grave and asked:
        return Verdict(status="fp8_not_engaged", summary=f"FP8 does not run: {grave.title.rstrip('.')}.")
    linears = facts.network.linears
    unread = facts.get("gaps", {}).get("network.linears")
    if unread and not linears:
        return Verdict(
            status="not_measured", summary=f"Whether it uses FP8 is not known: {unread.rstrip('.')}."
        )
    if named := named_after_fp8(linears):
        return Verdict(status="not_measured", summary=_by_name(named, linears))
    if outside:
        return Verdict(status="not_measured", summary=outside)
    stored = sum(linear.use == "storage" for linear in linears)
    if told := short_of_training(facts) or (_stored(stored, linears) if stored else ""):
        return _in_bf16(told, facts, findings)
    if rehearsing := [linear for linear in linears if rehearses_quantization(linear)]:
        return Verdict(
            status="no_fp8",
            summary=f"No FP8 training: {len(rehearsing)} of {len(linears)} Linears "
            f"({layer_label(rehearsing[0])}) rehearse quantization: they round as it will and multiply in 16 "
            "bits.",
        )
    if asked:
        return _in_bf16("FP8 was asked for; this model holds no FP8 layer, or none yet.", facts, findings)
    now = f" {IN_FP32}." if if_recorded(runs_in_fp32, facts) else ""
    return _in_bf16(f"This model uses no FP8{_and_none_asked(facts)}.{now}", facts, findings)


def _in_bf16(summary: str, facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Say what FP8 would give a model without it, or why there is no estimate."""
    expects = expected_speedup(facts, findings)
    told = expects.sentence if expects else why_not_modelled(facts, findings).of()
    return Verdict(
        status="no_fp8",
        summary=f"{summary} {told}",
        basis="modelled" if expects else None,
        achievable_speedup=expects.best if expects else None,
    )


def expected_speedup(
    facts: Facts, findings: Iterable[Finding], *, as_it_ran: bool = True
) -> ModelledSpeedup | None:
    """Model the speedup of a job's FP8, or of its conversion; None if that is unknown.

    If a finding says that the step is not what it seems, the step with its fix is modelled.
    """
    doubts = list(filter(invalidates, findings))
    if facts.get("network.fp8_calls") and not uses_fp8(facts):
        return None
    if not all(map(_keeps_layers, doubts)):
        return None
    found = if_recorded(_modelled, facts, fixed=bool(doubts))
    return beside_its_run(found, facts) if found and as_it_ran else found


def _keeps_layers(finding: Finding) -> bool:
    """Return whether a finding has a fix after which the same layers run as they seem to."""
    check = registry.check_of(finding)
    keeps = finding.area in KEEPS_LAYERS or (check is not None and check.keeps_layers)
    return finding.treatment is not None and keeps


KEEPS_LAYERS = ("compilation", "distributed")
"""Areas whose fixes keep the layers that are in FP8, and their shapes: the fixed step is the modelled one."""


def _modelled(facts: Facts, *, fixed: bool) -> ModelledSpeedup | None:
    return modelled_speedup(facts, fixed=fixed) if uses_fp8(facts) else modelled_conversion(facts)


def short_of_training(facts: Facts) -> str:
    """Describe FP8 parts of a model that does not train in it; empty without any."""
    linears, ran = facts.network.linears, _ran_in_script(facts)
    stored = sum(linear.use == "storage" for linear in linears)
    in_fp8 = sum(map(stores_fp8, linears))
    if computing := sum(map(computes_forward_in_fp8, linears)):
        others = f"; in {stored - computing} more only the weights are in low precision"
        return (
            f"No FP8 training: {computing} of {len(linears)} Linears multiply in FP8 only in the forward"
            f"{others if stored > computing else ''}{f', and {ran}' if ran else ''}."
        )
    if in_fp8 and ran:
        return f"{in_fp8} of {plural(len(linears), 'Linear')} store their weights in FP8, and {ran}."
    if ran:
        return f"No layer of a known FP8 library was found, yet {ran}."
    return _stored(stored, linears) if in_fp8 else ""


def _stored(count: int, linears: Sequence[Linear]) -> str:
    """Say that weights are in low precision and nothing else is."""
    return f"No FP8 training: {count} of {len(linears)} Linears only store their weights in low precision."


def _and_none_asked(facts: Facts) -> str:
    """Say that nobody asked for FP8, as far as that is known."""
    given = facts.get("environment.fp8_arguments", ())
    if given:
        return f"; whether the step multiplies in FP8, as the argument {given[0]} asks, was not counted"
    converter = of_converter(facts)
    if converter is None or (converter.called is False and not converter.named):
        return ", and none was asked for"
    if converter.called is None:
        return "; no setting asks for it, and whether a converter was called on it was not seen"
    if converter.called:
        return ": another model was converted"
    return ": its code calls a converter somewhere, and that call has not run"


def named_after_fp8(linears: Sequence[Linear]) -> list[Linear]:
    """List layers that are FP8 by name, if nothing shows what they multiply in."""
    return [linear for linear in linears if linear.use == "unknown"]


def _by_name(named: Sequence[Linear], linears: Sequence[Linear]) -> str:
    """Say that layers are FP8 by their name alone."""
    some, first = f"{len(named)} of {plural(len(linears), 'Linear')}", layer_label(named[0])
    return (
        f"FP8 by name in {some} ({first}), a class of no known FP8 library. Its code shows no FP8 matmul of "
        "torch's; whether FP8 runs was not seen."
    )


def fp8_outside_layers(facts: Facts) -> str:
    """Say that FP8 is in functions, as far as the code tells; empty without such functions."""
    calls = facts.network.get("fp8_calls", ())
    if not calls:
        return ""
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return (
        f"FP8 is outside of layers: the code names {calls[0]}{more}. What it costs or saves is unknown: "
        "time your step with it and without."
    )


def _ran_in_script(facts: Facts) -> str:
    """Say that FP8 matmuls ran in a watched script's profiled step; empty without any."""
    count = facts.get("observed.fp8_gemms")
    return f"{plural(count, 'FP8 matmul')} ran in a step of {watched_job(facts)}" if count else ""


KEEPS_FP8_OUT = ("environment", "engagement")
"""Areas in which an error is the reason why a model that was to train in FP8 holds no FP8 layer."""


def _set_up(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Say what is expected of a model that holds FP8 layers."""
    linears = facts.network.linears
    in_fp8 = [linear for linear in linears if linear.use == "training"]
    if why := why_fp8_does_not_run(facts):
        basis: Basis | None = "measured" if never_ran_in_script(facts) else None
        return Verdict(status="fp8_not_engaged", summary=why, basis=basis)
    ran = _ran_in_script(facts)
    expects = expected_speedup(facts, findings)
    told = expects.sentence if expects else why_not_modelled(facts, findings).of()
    share = f" ({flops_share_pct(in_fp8, facts):.0f}% of the matmul FLOPs)" if shares_are_known(facts) else ""
    setup = f"{len(in_fp8)} of {len(linears)} Linears{share}"
    return Verdict(
        status="not_measured",
        summary=f"FP8 is set up in {setup}{f', and {ran}' if ran else ''}. Whether it is faster than BF16 "
        f"was not measured. {told}",
        achievable_speedup=expects.best if expects else None,
        basis="modelled" if expects else None,
    )


def estimated(answer: Verdict, facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Add the estimated speedup of FP8 as it is, unless a GPU timed it."""
    on_gpu = answer.basis == "measured" and answer.speedup is not None and not timed_on_cpu(facts)
    if on_gpu or why_not_engaged(facts) or not is_what_it_seems(findings):
        return answer
    expects = if_recorded(modelled_speedup, facts)
    return replace(answer, estimated_speedup=beside_its_run(expects, facts).as_is) if expects else answer


def why_no_estimate(facts: Facts, findings: Sequence[Finding]) -> str:
    """Say why there is no estimate of a job's FP8, or why it has none."""
    return why_not_engaged(facts) or why_not_modelled(facts, findings).of()


def why_not_modelled(facts: Facts, findings: Iterable[Finding]) -> NoEstimate:
    """Say why the cost model has no speedup for a job, nor for its conversion."""
    others = any(not _keeps_layers(each) for each in filter(invalidates, findings))
    expects = if_recorded(_modelled, facts, fixed=True)
    if others and expects:
        return NoEstimate("a fix changes which layers run in FP8, or their shapes")
    try:
        return unknown_part(facts)
    except Unrecorded as missing:
        return NoEstimate(f"{path_of(missing)} was not recorded")


def nothing_in_fp8(answer: Verdict, facts: Facts) -> bool:
    """Return whether the answer is that a conversion to FP8 takes no layer of this model."""
    untimed = answer.status == "no_fp8" and answer.basis != "measured" and recorded(facts, "network")
    return untimed and bool(if_recorded(nothing_to_convert, facts.network))


def has_no_fp8(answer: Verdict, facts: Facts) -> bool:
    """Return whether no conversion, or none under Unsloth, gives this model FP8."""
    return nothing_in_fp8(answer, facts) or (answer.status == "no_fp8" and trains_in_16_bits(facts))


def is_what_it_seems(findings: Iterable[Finding]) -> bool:
    """Return whether a modelled step is the step that runs, by the findings."""
    return not any(map(invalidates, findings))


def invalidates(finding: Finding) -> bool:
    """Return whether a finding says that the modelled step is not the one that runs.

    Compile marks without effect do not count if the facts call no layer compiled.
    """
    if finding.get("breaks") == "step_raises":
        return True
    check = registry.check_of(finding)
    return (
        check is not None
        and check.invalidates_model
        and finding.severity != "info"
        and finding.evidence.get("examined_as_uncompiled") is not True
    )
