"""The most that FP8 can give, as one line of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from fp8doctor.analysis.arms import arm, best_bf16
from fp8doctor.analysis.outcome import ceiling
from fp8doctor.analysis.treatment_table import that_help_bf16_too
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import ArmName

RESTS_ON = {"measured": "from measured kernel times", "modelled": "estimated from the datasheet"}
"""Basis of the bound -> what it was computed from."""


def limit(facts: Facts, steps: Sequence[Step]) -> str:
    """Write the upper bound; empty if it is not known, and beside a plan that it does not hold for.

    The bound is on the step with the best BF16 as it is. A plan that makes BF16 faster too goes beyond it.
    """
    most = ceiling(facts)
    if most is None or that_help_bf16_too(step.treatment.name for step in steps):
        return ""
    planned, bf16 = arm(facts.trial, ArmName.PRESCRIBED), best_bf16(facts)
    if (
        planned
        and bf16
        and planned.step_ms
        and bf16.step_ms
        and bf16.step_ms / planned.step_ms > most.speedup
    ):
        return ""
    how = RESTS_ON.get(most.basis, most.basis)
    return f"Upper bound: {most.speedup:.2f}× BF16, if every conversion to FP8 were free ({how})."
