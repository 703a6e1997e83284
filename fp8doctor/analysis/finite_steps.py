"""Whether loss and gradients were finite, in the job's own step and in BF16."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.analysis.layers import stores_fp8
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName


class FiniteSteps(Struct, frozen=True):
    """What of which step was not finite, as far as somebody looked."""

    now: tuple[str, ...] | None
    """``loss``, ``gradients`` of the job's own step, watched or timed; empty if finite, None if unknown."""
    bf16: bool | None
    """Whether BF16 is finite with the same weights and batch; None if unknown. It is the job's own step if
    the model holds no FP8."""


def finite_steps(facts: Facts) -> FiniteSteps:
    """Read what was watched, and what the trial looked at."""
    now = _watched(facts)
    for each in _timed(facts, ArmName.AS_IS):
        now = tuple(dict.fromkeys((*(now or ()), *each)))
    bf16 = [not each for each in _timed(facts, *BF16_BASELINES)]
    if now is not None and recorded(facts, "network.linears"):
        network = facts.network
        layers = any(each.use in ("training", "unknown") or stores_fp8(each) for each in network.linears)
        if layers or network.get("float8_parameters") or network.get("fp8_calls"):
            return FiniteSteps(now, all(bf16) if bf16 else None)
        bf16.append(not now)
    return FiniteSteps(now, all(bf16) if bf16 else None)


def _watched(facts: Facts) -> tuple[str, ...] | None:
    """Return what was not finite in the script's own steps; None if nobody saw its loss."""
    if found := facts.get("not_finite"):
        return (found.what,)
    losses = facts.get("observed.losses")
    return losses and (("loss",) if None in losses else ())


def _timed(facts: Facts, *names: str) -> list[tuple[str, ...]]:
    """List what was not finite in the variants of these names that the trial looked at."""
    found = (each.get("non_finite") for each in facts.arms() if each.name in names and each.tried)
    return [each for each in found if each is not None]
