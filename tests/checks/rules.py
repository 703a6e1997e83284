"""One rule by its name, as the registry runs it."""

import re
from collections.abc import Callable
from itertools import takewhile

from fp8doctor.diagnosis.savings import run
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, Outcome, Treatment
from fp8doctor.registry import discover

Look = Callable[..., Facts]

SETS = re.compile(r"[A-Z][A-Z0-9_]*=")
"""A word that sets a variable for the shell command after it."""


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


def settings(line: str) -> dict[str, str | None]:
    """The variables that a shell line sets (value) or unsets (None)."""
    words = line.partition("#")[0].split()
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command == "unset":
        return dict.fromkeys(rest)
    pairs = [each.partition("=") for each in rest] if command == "export" else []
    if SETS.match(command):
        pairs = [each.partition("=") for each in takewhile(SETS.match, words)]
    return {name: value for name, mark, value in pairs if mark}
