"""From facts to the document: checks, prescription and verdict. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from fp8doctor import registry
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.answer import answer, verdict
from fp8doctor.answer.open_questions import run_again
from fp8doctor.answer.record import Answer
from fp8doctor.answer.sentences import box
from fp8doctor.diagnosis.dialects import in_dialect
from fp8doctor.diagnosis.document import EXPLAIN, Document, Next, Step, Tool, now, read_saved, tool
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.diagnosis.plan import make_plan, prescribe
from fp8doctor.diagnosis.savings import run, with_measured_savings
from fp8doctor.facts import Facts
from fp8doctor.gpus import gpu_spec, modelled_gpu


def diagnose(
    facts: Facts,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    checks: Sequence[Path] = (),
    reasons: Mapping[str, str] = MappingProxyType({}),
    written_by: Tool | None = None,
    created_at: str | None = None,
) -> Document:
    """Run the checks over ``facts`` and write the report.

    Those that are ignored propose and report nothing, but a time is estimated only if none refutes its model.
    ``reasons`` says why codes of ``ignore`` are ignored. Raises `UserError` for an unknown code.
    """
    known, view = registry.discover(checks), TrialView(facts)
    catalogue = registry.select(known, select, ignore)
    findings, outcomes = with_measured_savings(view, *run(catalogue, facts))
    every = findings if catalogue == known else with_measured_savings(view, *run(known, facts))[0]
    expected = Expected(facts, every)
    prescription = make_plan(view, findings, expected)
    findings = in_dialect(findings, facts)
    prescription = in_dialect(prescription, facts)
    said = answer(view, findings, prescription, outcomes, expected)
    told, gpu = verdict(said, facts, box(said).summary), modelled_gpu(facts)
    return Document(
        tool=written_by or tool(),
        created_at=created_at or now(),
        facts=facts,
        verdict=told,
        findings=findings,
        prescription=said.fixes,
        outcomes=outcomes,
        next=_next(said, facts),
        ignored=dict(reasons),
        modelled_gpu=gpu.name if gpu else facts.get("assumed_gpu") or "",
        answer=said,
    )


def _next(said: Answer, facts: Facts) -> Next | None:
    """Choose the page of the plan's first check, else the command that answers what is open."""
    verify = run_again(facts)
    step = next((each for each in said.fixes if each.code), None)
    if step is not None:
        return Next(command=f"{EXPLAIN}{step.code}", saving_ms=step.saving_ms, verify=verify)
    return Next(command=said.command, saving_ms=None, verify=verify) if said.command else None


def hypotheses(
    facts: Facts, *, select: Sequence[str] = (), ignore: Sequence[str] = (), checks: Sequence[Path] = ()
) -> tuple[Step, ...]:
    """Propose fixes for a trial, also to give FP8 up, which only a time decides."""
    findings, _ = run(registry.select(registry.discover(checks), select, ignore), facts)
    return prescribe(findings, facts)


def replay(path: str | Path, *, assume_gpu: str | None = None, **options: Any) -> Document:
    """Run this version's checks over a saved report's facts, with the options of `diagnose`.

    It keeps its time and tool. Raises `UserError`, also for a GPU that has no datasheet.
    """
    facts, written_by, created_at = read_saved(path)
    if assume_gpu:
        facts = msgspec.structs.replace(facts, assumed_gpu=assume_gpu)
    if facts.get("assumed_gpu"):
        gpu_spec(facts.assumed_gpu)
    return diagnose(facts, written_by=written_by, created_at=created_at, **options)
