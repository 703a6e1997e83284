"""The verdict as a record of the JSON; a broken job takes precedence over its speed."""

from typing import Literal

from fp8doctor.facts import Facts, Prose, Record, recorded
from fp8doctor.facts.arm_names import OWN_STEP_FAILED
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Basis, Breaks

Status = Literal[
    "step_raises",
    "layers_do_not_learn",
    "does_not_fit",
    "not_finite",
    "fp8_not_engaged",
    "no_fp8",
    "fp8_slower",
    "fp8_even",
    "fp8_faster",
    "open",
]
"""The gravest first. ``open``: nothing tells whether FP8 or BF16 is faster."""

GRAVE: tuple[Status, ...] = ("step_raises", "layers_do_not_learn", "not_finite", "fp8_not_engaged")
"""Answers that count as errors whatever the severity of the findings; so does a measured ``fp8_slower``."""

BROKEN: dict[Breaks, str] = {
    "step_raises": "The training step will raise",
    "layers_do_not_learn": "Layers do not learn",
    "not_finite": "The loss is not finite",
}
"""First words of an answer about more than speed, the most severe first."""


class Open(Record, frozen=True, kw_only=True):
    """A question without an answer, and the command that answers it."""

    what: str
    command: str = ""
    """Empty if no command of fp8doctor helps."""


class Verdict(Record, frozen=True, kw_only=True):
    """The answer of the JSON. ``speedup`` is best BF16 / as it is. All times are of one clock."""

    status: Status
    summary: Prose
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    basis: Basis | None = None
    achievable_speedup: float | None = None
    """What FP8 would give a job without it."""
    estimated_speedup: float | None = None
    """Best BF16 / as it is by the cost model, on the report's ``modelled_gpu``; None if a GPU timed both, or
    the cost model has no numbers."""
    step_ms: float | None = None
    bf16_step_ms: float | None = None
    best_step_ms: float | None = None
    """The step with the plan, for as many tokens as now."""
    best_variant: str | None = None
    """Its name, as in the facts of a trial; ``planned`` for an estimate."""
    best_basis: Basis | None = None
    tokens_per_s: float | None = None
    """Of ``step_ms``."""
    whole_step_low: float | None = None
    whole_step_high: float | None = None
    """Bounds of the speedup of a whole step on several GPUs, with its communication, estimated; None if the
    timed copies are the whole step, and for the lower one if the upper one is all that is known."""
    open: tuple[Open, ...] = ()
    """What could change the verdict or the plan."""


def own_step_failed(facts: Facts) -> bool:
    """Return whether the user's own step raised when it was to be timed. One that was watched runs: a copy
    of it raised."""
    watched = recorded(facts, "observed")
    return recorded(facts, "trial") and not watched and why_of(facts.trial) in OWN_STEP_FAILED
