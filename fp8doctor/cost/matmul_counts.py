"""Counts of one step: rows and matmuls, and the work that checkpointing repeats."""

from fp8doctor.facts import Checkpointing, Facts, Linear, recorded
from fp8doctor.recipes import TRANSFORMER_ENGINE

EXPERTS_PER_LAUNCH = 8
"""Experts of a ``te.GroupedLinear`` that take the host as long as another te.Linear: 6.1 and 12.9 ms for 64
and 128 in BF16, 11.3 and 28.4 in delayed scaling, where a te.Linear takes 0.7 and 1.2. One H200,
research/benchmarks/measured/h200_grouped.json.gz."""


def step_tokens(facts: Facts) -> int | None:
    """Count the rows of the matmuls in one micro-batch; None if unknown."""
    tokens: int | None = facts.get("workload.tokens")
    return tokens


def micro_batches(facts: Facts) -> int:
    """Count the micro-batches per step; 1 if unknown."""
    return int(facts.get("workload.accumulate", 1))


def all_tokens(facts: Facts) -> int:
    """Count the tokens of a step, of all of its micro-batches; 1 for unknown ones."""
    return (step_tokens(facts) or 1) * micro_batches(facts)


def gemms(linear: Linear) -> int:
    """Count matmuls of the layer's shape in one forward; 1 if unknown."""
    return int(linear.get("gemms", 1))


def rows_of(linear: Linear, facts: Facts) -> int | None:
    """Return the rows of one call: counted, else a micro-batch's tokens, or None."""
    return max(rows_seen(linear, facts), default=0) or step_tokens(facts)


def calls_of(linear: Linear, facts: Facts) -> int:
    """Count the calls with so many rows in one forward; 1 if unknown."""
    seen = rows_seen(linear, facts)
    return max(1, round(sum(seen) / max(seen))) if any(seen) else 1


def rows_seen(linear: Linear, facts: Facts) -> tuple[int, ...]:
    """Return the rows of every call in one forward; empty if nobody counted them.

    The trial counts them on real tensors. Without one they are those of a forward on fake tensors.
    """
    timed, fake = facts.get("trial.rows", {}), facts.get("workload.rows", {})
    return (timed.get(linear.name) or fake.get(linear.name, ())) if timed or fake else ()


def is_grouped(linear: Linear) -> bool:
    return linear.get("role") == "experts" and gemms(linear) > 1


def one_by_one(linear: Linear) -> bool:
    """Return whether the host launches each expert: those of a te.GroupedLinear, which Dynamo leaves out."""
    te = TRANSFORMER_ENGINE.name in (linear.get("stack"), linear.get("kind", "").partition(".")[0])
    return te and is_grouped(linear)


def launches(linear: Linear, share: float = 1.0) -> float:
    """Return the host's time for all matmuls of a layer / that for one Linear, in one call.

    ``share`` of the experts' launches are made: in FP8 those are the casts of weights, which may be kept.
    """
    if one_by_one(linear):
        return 1.0 + share * gemms(linear) / EXPERTS_PER_LAUNCH
    return 1.0 if is_grouped(linear) else gemms(linear)


def passes(linear: Linear) -> int:
    """Count the matmuls of one call, its backward included, from the FLOPs per token: 1 to 3."""
    most = 3 if linear.get("requires_grad") is not False else 2
    flops = float(linear.get("flops_per_token") or 0)
    if not flops or linear.get("role") == "experts":
        return most
    one = 2.0 * linear.in_features * linear.out_features * gemms(linear)
    return min(most, max(1, round(flops / one)))


def routed_rows(linear: Linear, facts: Facts) -> int | None:
    """Count the rows of all experts of a weight: as seen, else tokens times visits.

    None if neither is known.
    """
    if seen := rows_seen(linear, facts):
        return sum(seen)
    tokens, flops = step_tokens(facts), float(linear.get("flops_per_token") or 0)
    if not tokens or not flops:
        return None
    products = 3 if linear.requires_grad is not False else 2
    return round(tokens * flops / (2.0 * products * linear.in_features * linear.out_features))


TE_RECOMPUTE_HOST_MS = 0.97
"""What recomputing an FP8 layer of Transformer Engine adds on the host: (29.8 - 14.2) / 16 in one recording,
h200-te_checkpointed_inside. No step is modelled that this would set the pace of."""


def covers(region: Checkpointing, linear: Linear) -> bool:
    """Return whether a layer is below the module whose forward calls ``checkpoint``."""
    return linear.name.startswith(f"{region.name}." if region.name else "")


def unseen_recompute(facts: Facts) -> str | None:
    """Name the module whose forward checkpoints layers unseen; None without one."""
    if not recorded(facts, "training.checkpointing"):
        return None
    unseen = [each for each in facts.network.linears if not recorded(each, "checkpointed")]
    for region in facts.training.checkpointing:
        calls = region.form == "called_in_forward" and region.active is not False
        if calls and any(covers(region, linear) for linear in unseen):
            return region.name
    return None
