"""The next command, its saving, and the command that verifies it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.diagnosis.document import EXPLAIN, Next, Step
from fp8doctor.facts import Facts, recorded


def next_step(prescription: Iterable[Step], verdict: Verdict, facts: Facts) -> Next | None:
    """Choose the page of the plan's first check, else the command that measures; else None."""
    verify = _again(facts)
    step = next((each for each in prescription if each.code), None)
    if step is not None:
        return Next(command=f"{EXPLAIN}{step.code}", saving_ms=step.saving_ms, verify=verify)
    if verdict.basis != "measured" and verify is not None and not _is_one_of_several(facts):
        return Next(command=_timed(facts) or verify, saving_ms=None, verify=verify)
    return None


def _timed(facts: Facts) -> str | None:
    """Write the command that times copies of this job; None for a live model."""
    return "fp8doctor model.py" if facts.target.kind == "environment" else _again(facts, "--stop ")


def _is_one_of_several(facts: Facts) -> bool:
    """Return whether the job has several processes, which are never copied."""
    return bool(facts.get("ranks.world_size", 1) > 1)


def _again(facts: Facts, option: str = "") -> str | None:
    """Write the command that examines the same job again; None for a live model.

    It starts in the job's folder. A script's arguments are the user's data, so a word stands for them.
    """
    if not recorded(facts, "target.kind") or not recorded(facts, "target.name"):
        return None
    kind, name = facts.target.kind, shlex.quote(facts.target.name)
    if kind == "environment":
        return "fp8doctor env"
    if kind == "live":
        return None
    if kind != "script":
        return f"fp8doctor {name}"
    module = "-m " if facts.get("target.module") else ""
    return f"fp8doctor run {option}{module}{name} ARGS..."
