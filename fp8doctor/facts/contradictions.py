"""Contradictions of a saved report, which was edited by hand or damaged."""

from __future__ import annotations

from fp8doctor.facts import Arm, Facts, recorded


def contradiction(facts: Facts) -> str | None:
    """Describe a contradiction; None without one."""
    if all(recorded(facts, f"network.{name}") for name in ("parameters", "adapter_parameters")):
        of, adapters = facts.network.parameters, facts.network.adapter_parameters
        if not 0 <= adapters <= of:
            return f"it says that {adapters} of {of} parameters are the adapters'"
    for arm in facts.arms():
        if arm.get("tried") and (lacks := _lacks(arm)):
            name = repr(arm.name) if recorded(arm, "name") else "an arm"
            return f"it says that {name} was timed, and has no {lacks}"
        breakdown = arm.breakdown if recorded(arm, "breakdown.families_ms") else None
        if breakdown and min(breakdown.families_ms.values(), default=0) < 0:
            return "it says that a family of kernels took less than 0 ms"
    return None


def _lacks(arm: Arm) -> str | None:
    """Name the part that this timed variant lacks; None if it has all."""
    if recorded(arm, "step_ms") and not (arm.step_ms and arm.step_ms > 0):
        return "step_ms above 0"
    if recorded(arm, "rounds_ms") and not (arm.rounds_ms and min(arm.rounds_ms) > 0):
        return "rounds_ms above 0"
    return "cuts" if recorded(arm, "cuts") and not arm.cuts else None
