"""The gain of an estimated plan, the savings of its fixes that are known, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.estimated_gain import EstimatedGain, estimated_gain
from fp8doctor.analysis.modelled_speedup import ModelledSpeedup
from fp8doctor.analysis.treatment_table import MORE_TOKENS, STAY_IN_BF16, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.expected_verdict import expected_speedup
from fp8doctor.diagnosis.giving_up import (
    CONVERTS,
    changes_fp8,
    planned_speedup,
    stays_in_bf16,
)
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding


def stops_first(facts: Facts, findings: Sequence[Finding]) -> bool:
    """Return whether the job ends before a step, so that nothing is faster than it is now."""
    checks = (registry.check_of(each) for each in findings if each.severity == "error")
    return any(each and each.stops_before_a_step for each in checks) and not uses_fp8(facts)


def planned_gain(facts: Facts, findings: Sequence[Finding], steps: Sequence[Step]) -> EstimatedGain | None:
    """Estimate what the plan gains; None if it is unknown, without a step now, or with more tokens."""
    if stops_first(facts, findings):
        return None
    now, planned = expected_speedup(facts, findings), planned_speedup(facts, findings, steps)
    if now is None or planned is None or any(step.treatment.name == MORE_TOKENS for step in steps):
        return None
    if stays_in_bf16(steps):
        return estimated_gain(now, None)
    if planned.recipes and not begins_fp8(steps, planned):
        return None
    return estimated_gain(now, planned)


def begins_fp8(steps: Sequence[Step], planned: ModelledSpeedup) -> bool:
    """Return whether a model without FP8 trains in it with the plan."""
    return any(map(converts, steps)) or (not planned.loses and any(map(changes_fp8, steps)))


def converts(step: Step) -> bool:
    return traits(step.treatment.name).family == CONVERTS


def is_modelled(step: Step) -> bool:
    """Return whether the model of a fixed FP8 step holds what this step changes."""
    return traits(step.treatment.name).compiles or changes_fp8(step) or converts(step)


def with_its_gain(steps: Sequence[Step], view: TrialView, findings: Sequence[Finding]) -> tuple[Step, ...]:
    """Give the fixes that the cost model knows the saving of its steps: the first has that of all.

    A check's own saving counts the kernels of some layers, without the host.
    """
    if view.on_gpu and view.bf16:
        return tuple(steps)
    stays, gain = stays_in_bf16(steps), planned_gain(view.facts, findings, steps)
    held = [
        step
        for step in steps
        if (step.treatment.name == STAY_IN_BF16 if stays else gain and is_modelled(step))
    ]
    known = [step for step in held if step.saving_ms] or held
    return tuple(
        replace(
            step,
            saving_ms=gain.saving if gain and step is known[0] else None,
            together=tuple(each.treatment.name for each in known if each is not step),
        )
        if step in known
        else step
        for step in steps
    )
