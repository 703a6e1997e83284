"""The conductor: facts, checks, prescription, verdict, report. Imports no torch; examining is done by who holds the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fp8doctor import registry
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Finding
from fp8doctor.measured import NO_FP8, measured, timed
from fp8doctor.modelled import expected, in_words
from fp8doctor.overview import fp8_was_asked_for
from fp8doctor.prescription import prescribe
from fp8doctor.report import Report, Tool, now, read_saved, tool
from fp8doctor.timed_plan import as_timed
from fp8doctor.verdict import Verdict


def diagnose(
    facts: Facts,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    checks: Sequence[Path] = (),
    written_by: Tool | None = None,
    created_at: str | None = None,
) -> Report:
    """Run the checks over ``facts`` and write the report. Raises `fp8doctor.errors.UserError` for an unknown code."""
    catalogue = registry.discover(checks)
    findings, outcomes = registry.run(registry.select(catalogue, select, ignore), facts)
    findings, outcomes = measured(facts, findings, outcomes)
    return Report(
        tool=written_by or tool(),
        created_at=created_at or now(),
        facts=facts,
        verdict=verdict(facts, findings),
        findings=findings,
        prescription=as_timed(prescribe(findings, {each.code: each.explained_by for each in catalogue}, facts), facts),
        outcomes=outcomes,
    )


def replay(path: str | Path, *, assume_gpu: str | None = None, select: Sequence[str] = (), ignore: Sequence[str] = (), checks: Sequence[Path] = ()) -> Report:
    """The checks of this version over the facts of a saved report, with its time and tool kept."""
    facts, written_by, created_at = read_saved(path)
    if assume_gpu:
        facts = msgspec.structs.replace(facts, assumed_gpu=assume_gpu)
    return diagnose(facts, select=select, ignore=ignore, checks=checks, written_by=written_by, created_at=created_at)


def verdict(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """The measured verdict where there is one. FP8 that was asked for and is not there stays so, whatever was timed."""
    measured_one, plain = timed(facts), judge(facts, findings)
    if measured_one is None:
        return plain
    if measured_one.status == "no_fp8" and plain.status == "fp8_not_engaged":
        return msgspec.structs.replace(measured_one, status=plain.status, summary=f"{plain.summary} {measured_one.summary.removeprefix(NO_FP8)}")
    return measured_one


def judge(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """The verdict that facts alone allow; nothing in it is measured."""
    if not recorded(facts.network):
        reason = facts.gaps.get("network") if recorded(facts.gaps) else None
        return Verdict(status="not_measured", summary=f"No model was examined: {reason.rstrip('.')}." if reason else "No model was examined.")
    linears = facts.network.linears
    in_fp8 = [linear for linear in linears if linear.use == "training"]
    if in_fp8 and all(linear.engaged is False for linear in in_fp8):
        return Verdict(status="fp8_not_engaged", summary=f"FP8 does not run: all {len(in_fp8)} FP8 layers ran their last training forward in BF16.")
    if in_fp8:
        share = sum(linear.flops_share_pct or 0.0 for linear in in_fp8)
        setup = f"FP8 is set up in {len(in_fp8)} of {len(linears)} Linears ({share:.0f} % of the GEMM FLOPs)."
        expects = expected(facts, findings)
        return Verdict(
            status="not_measured",
            summary=f"{setup} Whether it is faster than BF16 was not measured.{' ' + in_words(expects) if expects else ''}",
            achievable_speedup=max(expects.as_is, expects.compiled) if expects else None,
            basis="modelled" if expects else None,
        )
    grave = next((finding for finding in findings if finding.severity == "error" and finding.area in ("environment", "engagement")), None)
    if grave and fp8_was_asked_for(facts):
        return Verdict(status="fp8_not_engaged", summary=f"FP8 does not run: {grave.title.rstrip('.')}.")
    stored = sum(linear.use == "storage" for linear in linears)
    if stored:
        return Verdict(status="no_fp8", summary=f"No FP8 training: {stored} of {len(linears)} Linears only store their weights in low precision.")
    if fp8_was_asked_for(facts):
        return Verdict(status="no_fp8", summary="FP8 was asked for; this model holds no FP8 layer, or none yet.")
    return Verdict(status="no_fp8", summary="This model uses no FP8, and none was asked for.")
