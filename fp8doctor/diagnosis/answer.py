"""The verdict as a record; a broken job takes precedence over its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import OWN_STEP_FAILED
from fp8doctor.facts.no_number import why_of
from fp8doctor.facts.record import Prose, Record
from fp8doctor.finding import Basis, Breaks, Finding

Status = Literal[
    "step_raises",
    "layers_do_not_learn",
    "not_finite",
    "fp8_not_engaged",
    "no_fp8",
    "not_measured",
    "too_noisy",
    "fp8_slower",
    "fp8_even",
    "fp8_faster",
]
"""The gravest first. ``too_noisy``: both steps were timed, and the timing does not tell which is faster."""


class Verdict(Record, frozen=True, kw_only=True):
    """The answer in one record. ``speedup`` is best BF16 / as it is; None is unknown.

    Of a timing that is too noisy to tell, ``speedup`` is None and the interval says how much it leaves open.
    """

    status: Status
    summary: Prose
    """One to three sentences."""
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    basis: Basis | None = None
    achievable_speedup: float | None = None
    estimated_speedup: float | None = None
    """Best BF16 / as it is by the cost model, on the report's ``modelled_gpu``; None if a GPU timed both, or
    the cost model has no numbers."""
    step_ms: float | None = None
    bf16_step_ms: float | None = None
    tokens_per_s: float | None = None
    whole_step_low: float | None = None
    whole_step_high: float | None = None
    """Bounds of the speedup of a whole step on several GPUs, with its communication, estimated; None if the
    timed copies are the whole step, and for the lower one if the upper one is all that is known."""


GRAVE: tuple[Status, ...] = ("step_raises", "layers_do_not_learn", "not_finite", "fp8_not_engaged")
"""Answers that count as errors whatever the severity of the findings; so does a measured ``fp8_slower``."""

BROKEN: dict[Breaks, str] = {
    "step_raises": "The training step will raise",
    "layers_do_not_learn": "Layers do not learn",
    "not_finite": "The loss is not finite",
}
"""First words of an answer about more than speed, the most severe first."""


def own_step_failed(facts: Facts) -> bool:
    """Return whether the user's own step raised when it was to be timed."""
    return recorded(facts, "trial") and why_of(facts.trial) in OWN_STEP_FAILED


def before_speed(answer: Verdict, facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """Put what breaks the job before what FP8 does to its speed."""
    if own_step_failed(facts):
        return msgspec.structs.replace(answer, status="step_raises", basis="measured")
    if refused := facts.get("workload.refused"):
        summary = f"{BROKEN['step_raises']}: {refused.rstrip('.')}."
        return msgspec.structs.replace(answer, status="step_raises", summary=summary, basis="rule")
    broken = [each for each in findings if recorded(each, "breaks")]
    for status, says in BROKEN.items():
        if worst := next((each for each in broken if each.breaks == status), None):
            return msgspec.structs.replace(
                answer,
                status=status,
                summary=f"{says}: {worst.title.rstrip('.')}. {answer.summary}",
                basis="measured" if answer.basis == "measured" else "rule",
            )
    return answer
