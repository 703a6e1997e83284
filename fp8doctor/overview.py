"""What the facts add up to, for the first screen and for checks: counts, shares, who asked for FP8."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fp8doctor.facts import Facts, Linear, recorded

LAUNCHER_FINGERPRINT = "ACCELERATE_FP8_FORMAT"
"""``accelerate launch`` writes this variable (with its siblings) only for fp8; `fp8_was_asked_for` relies on it.
Source: accelerate 1.15 ``utils/launch.py``; the same from 1.4 on."""


@dataclass(frozen=True)
class Layers:
    """How many layers of one class, and their share of the GEMM FLOPs."""

    label: str
    count: int
    flops_share_pct: float


def fp8_was_asked_for(facts: Facts) -> str | None:
    """Who asked for FP8, in words; None when nobody did or nothing of it was recorded."""
    variables = facts.environment.variables if recorded(facts.environment) and recorded(facts.environment.variables) else {}
    if variables.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8":
        return "ACCELERATE_MIXED_PRECISION=fp8"
    if LAUNCHER_FINGERPRINT in variables:
        return f"the launcher ({LAUNCHER_FINGERPRINT} is set)"
    if recorded(facts.training):
        accelerate, trainer = facts.training.accelerate, facts.training.trainer
        if recorded(accelerate) and accelerate and accelerate.mixed_precision == "fp8":
            return "Accelerator(mixed_precision='fp8')"
        if recorded(trainer) and trainer and trainer.mixed_precision == "fp8":
            return "TrainingArguments"
    return None


def layer_label(linear: Linear) -> str:
    """The name a user knows a layer's class by: ``te.Linear``, ``Float8Linear``, ``Linear``."""
    name = linear.kind.rpartition(".")[2]
    return f"te.{name}" if linear.stack == "transformer_engine" else name


def fp8_layers(linears: tuple[Linear, ...]) -> tuple[Layers, ...]:
    """FP8 layers by class, the commonest first; ``te.Linear`` and ``Float8Linear`` are always among them."""
    counts: Counter[str] = Counter({"te.Linear": 0, "Float8Linear": 0})
    shares: dict[str, float] = {}
    for linear in linears:
        if linear.use != "none":
            label = layer_label(linear)
            counts[label] += 1
            shares[label] = shares.get(label, 0.0) + (linear.flops_share_pct or 0.0)
    return tuple(Layers(label, count, shares.get(label, 0.0)) for label, count in sorted(counts.items(), key=lambda item: item[1]))
