"""How much of everything one step holds: rows of a GEMM, GEMMs of a layer, micro-batches."""

from __future__ import annotations

from fp8doctor.facts import Facts, Linear, recorded


def step_tokens(facts: Facts) -> int | None:
    """Rows of the GEMMs in one micro-batch; None when that is not known."""
    tokens = facts.workload.tokens if recorded(facts.workload) else None
    return tokens if recorded(tokens) else None


def micro_batches(facts: Facts) -> int:
    """Of one step; one where that is not known."""
    return facts.workload.accumulate if recorded(facts.workload) and recorded(facts.workload.accumulate) else 1


def gemms(linear: Linear) -> int:
    """GEMMs of its shape in one forward; one where that is not known."""
    return linear.gemms if recorded(linear.gemms) else 1
