"""Counts of one step: rows of a matmul, matmuls of a layer, micro-batches."""

from __future__ import annotations

from fp8doctor.facts import Facts, Linear, recorded


def step_tokens(facts: Facts) -> int | None:
    """Count the rows of the matmuls in one micro-batch; None if unknown."""
    return facts.workload.tokens if recorded(facts, "workload.tokens") else None


def micro_batches(facts: Facts) -> int:
    """Count the micro-batches per step; 1 if unknown."""
    return facts.workload.accumulate if recorded(facts, "workload.accumulate") else 1


def gemms(linear: Linear) -> int:
    """Count matmuls of the layer's shape in one forward; 1 if unknown."""
    return linear.gemms if recorded(linear, "gemms") else 1


def rows_of(linear: Linear, facts: Facts) -> int | None:
    """Return the rows of one call: counted, else a micro-batch's tokens; None if unknown."""
    seen = rows_seen(linear, facts)
    return max(seen) if any(seen) else step_tokens(facts)


def calls_of(linear: Linear, facts: Facts) -> int:
    """Count the calls with so many rows in one forward; 1 if unknown."""
    seen = rows_seen(linear, facts)
    return max(1, round(sum(seen) / max(seen))) if any(seen) else 1


def products_of(linear: Linear, facts: Facts) -> int:
    """Count the matmuls with these rows in one forward, over all calls and experts."""
    together = gemms(linear) > 1 and linear.role == "experts" and any(rows_seen(linear, facts))
    return calls_of(linear, facts) * (1 if together else gemms(linear))


def rows_seen(linear: Linear, facts: Facts) -> tuple[int, ...]:
    """Return the rows of every call in one forward; empty if nobody counted them.

    The trial counts them on real tensors. Without one they are those of a forward on fake tensors.
    """
    timed = facts.get("trial.rows", {})
    fake = facts.get("workload.rows", {})
    return timed.get(linear.name) or fake.get(linear.name, ()) if timed or fake else ()
