"""The estimated speedup of a job, as far as its findings let the cost model speak of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.modelled_speedup import ModelledSpeedup, modelled_conversion, modelled_speedup
from fp8doctor.analysis.no_estimate import NoEstimate, unknown_part
from fp8doctor.analysis.watched_speedup import beside_its_run
from fp8doctor.diagnosis.engagement import why_not_engaged
from fp8doctor.facts import Facts, Unrecorded, if_recorded, recorded
from fp8doctor.facts.paths import path_of
from fp8doctor.finding import Finding

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
