"""Accelerate's state, where it is about the model that is looked at: the process has one for all models."""

from __future__ import annotations

from fp8doctor.facts import Accelerate, Facts, recorded


def accelerate_of_model(facts: Facts) -> Accelerate | None:
    """Return the state of the Accelerator that prepared this model or may still prepare it; None without one.

    Where nobody recorded whether an Accelerator may, the state counts.
    """
    if not recorded(facts, "training.accelerate"):
        return None
    accelerate = facts.training.accelerate
    if accelerate is None or accelerate.prepared:
        return accelerate
    excluded = recorded(accelerate, "may_prepare") and accelerate.may_prepare is False
    return None if excluded else accelerate


def was_prepared(facts: Facts) -> bool:
    """Whether Accelerate's ``prepare`` got this model."""
    accelerate = facts.accelerate()
    return accelerate is not None and accelerate.prepared


NOT_FP8 = ("bf16", "no")
"""Precisions under which ``prepare`` converts nothing. On an old GPU the state of fp8 says fp16."""


def may_have_converted(facts: Facts) -> bool:
    """Whether Accelerate's ``prepare`` got this model and may have converted it; else its script did."""
    accelerate = facts.accelerate()
    if accelerate is None or not accelerate.prepared:
        return False
    return not recorded(accelerate, "mixed_precision") or accelerate.mixed_precision not in NOT_FP8
