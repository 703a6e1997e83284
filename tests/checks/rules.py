"""One rule by its name, as the registry runs it."""

from __future__ import annotations

from collections.abc import Callable

from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, Outcome, Treatment
from fp8doctor.registry import discover, run

Look = Callable[..., Facts]


def _run(name: str, facts: Facts) -> tuple[Finding | None, Outcome]:
    findings, (outcome,) = run([each for each in discover() if each.name == name], facts)
    return (findings[0] if findings else None), outcome


def finding_of(name: str, facts: Facts) -> Finding | None:
    """The finding of the rule."""
    return _run(name, facts)[0]


def found_by(name: str, facts: Facts) -> Finding:
    """The finding of a rule that fires."""
    finding, outcome = _run(name, facts)
    assert finding is not None, outcome
    return finding


def outcome_of(name: str, facts: Facts) -> str:
    """How the rule answers: ``fires``, ``silent``, ``not_applicable`` or ``unknown``."""
    return _run(name, facts)[1].outcome


def answer_of(name: str, facts: Facts) -> Outcome:
    """How the rule answers, with its reason."""
    return _run(name, facts)[1]


def fix_of(name: str, facts: Facts) -> Treatment:
    """The fix of a rule that fires with one."""
    treatment = found_by(name, facts).treatment
    assert treatment is not None
    return treatment
