"""Arms for the facts of a real object: times and peaks that a trial on a GPU would have measured."""

from typing import Any

from msgspec.structs import replace

from fp8doctor.facts import Arm, Facts, Trial
from fp8doctor.facts.arm_names import Reason

ROUNDS = 6


def ran(name: str, ms: float = 100.0, *, spread_ms: float = 0.0, **fields: Any) -> Arm:
    """An arm that was timed: every round within ``spread_ms`` of the median."""
    rounds = tuple(ms + spread_ms * (2 * number / (ROUNDS - 1) - 1) for number in range(ROUNDS))
    return Arm(
        name=name, tried=True, reason=None, step_ms=ms, rounds_ms=rounds, **{"treatments": ()} | fields
    )


def failed(name: str, reason: str, **fields: Any) -> Arm:
    """An arm that gave no number."""
    return Arm(name=name, tried=False, reason=reason, **{"treatments": ()} | fields)


def too_late(name: str, *treatments: str) -> Arm:
    """An arm that the budget left no time for."""
    return failed(name, "the budget of 60 s ran out", why=Reason.NO_TIME_LEFT, treatments=treatments)


def timed(facts: Facts, *arms: Arm, device: str = "cuda") -> Facts:
    """The facts with a trial of these arms."""
    return replace(
        facts,
        trial=Trial(
            device=device,
            gpu="NVIDIA H200" if device == "cuda" else None,
            arms=arms,
            reliable=True,
            reason=None,
        ),
    )
