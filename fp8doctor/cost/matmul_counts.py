"""Counts of one step: rows and matmuls, and the work that checkpointing repeats."""

from __future__ import annotations

from msgspec.structs import replace

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
    """Return the rows of one call: counted, else a micro-batch's tokens, or None."""
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


RECOMPUTED = {"between": 1 / 3, "casts": 0.1}
"""Share that a checkpointed block runs a second time. Between Linears: assumed. Casts: checkpointing all 24
blocks of a decoder of width 1024 costs 14.6 ms in FP8 and 21.5 in BF16, of which 9 are the matmuls; backward,
which casts again, shares the rest. Transformer Engine casts input and weight again, and no gradient: 4.48
instead of 2.39 ms in blocks of width 4096 with 1,024 rows, where their share of all that is cast gives 4.50.
Held out, it gives 2.01 for the 2.06 ms of h200-te_own_checkpoint."""

TE_RECOMPUTE_HOST_MS = 0.97
"""What recomputing an FP8 layer of Transformer Engine adds on the host: (29.8 - 14.2) / 16, of one recording
(h200-te_checkpointed_inside), more than its forward and backward take. In the other with a recompute in FP8
(h200-te_own_checkpoint) the GPU sets the pace, which only says that it is below 1.7. One recording explains
nothing, so that no step is modelled that this would set the pace of."""


def is_recomputed(linear: Linear) -> bool:
    """Return whether the layer runs in a checkpointed region."""
    return linear.get("checkpointed") is not None


def recomputed_by_te(linear: Linear) -> bool:
    """Return whether it is an FP8 layer of Transformer Engine in one."""
    return is_recomputed(linear) and is_te(linear)


def may_be_recomputed_by_te(linear: Linear, facts: Facts) -> bool:
    """Return whether it is one, or may be below a forward that calls ``checkpoint``."""
    return recomputed_by_te(linear) or (
        is_te(linear)
        and not recorded(linear, "checkpointed")
        and recorded(facts, "training.checkpointing")
        and any(
            each.form == "called_in_forward"
            and each.active
            and linear.name.startswith(f"{each.name}." if each.name else "")
            for each in facts.training.checkpointing
        )
    )


def unseen_recompute(facts: Facts) -> str | None:
    """Name the module whose forward checkpoints layers unseen; None without one."""
    if not recorded(facts, "training.checkpointing"):
        return None
    for each in facts.training.checkpointing:
        below = f"{each.name}." if each.name else ""
        if each.form == "called_in_forward" and each.active is not False:
            for linear in facts.network.linears:
                if linear.name.startswith(below) and not recorded(linear, "checkpointed"):
                    return each.name
    return None


def is_te(linear: Linear) -> bool:
    """Return whether it is an FP8 layer of Transformer Engine."""
    return linear.use == "training" and linear.stack == "transformer_engine"


def without_checkpointing(facts: Facts) -> Facts:
    """Keep every activation of the job."""
    kept = tuple(replace(each, checkpointed=None) for each in facts.network.linears)
    facts = replace(facts, network=replace(facts.network, linears=kept))
    if not recorded(facts, "training"):
        return facts
    return replace(facts, training=replace(facts.training, checkpointing=()))
