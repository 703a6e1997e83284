"""The modelled BF16 step compared with the step that a script was watched in."""

from __future__ import annotations

from statistics import median

from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import GEMMS, ModelledParts, ModelledSpeedup
from fp8doctor.analysis.rank_comparison import exposed_of_ranks, late_ms
from fp8doctor.cost.matmul_counts import micro_batches
from fp8doctor.facts import Breakdown, Facts, if_recorded, recorded


def beside_its_run(found: ModelledSpeedup, facts: Facts) -> ModelledSpeedup:
    """Compare the modelled BF16 step with the watched step, if there is one, instead of the modelled one.

    Communication and the wait for a late rank are in every step. BF16 that ran faster than its model is the
    best BF16.
    """
    ran_ms, alone = watched_ms(facts), found.parts
    if ran_ms is None or alone is None:
        return found
    exposed_ms = min(if_recorded(exposed_of_ranks, facts) or (0.0,))
    late = if_recorded(late_ms, facts) or 0.0
    shared_ms = min(ran_ms, exposed_ms + late)
    bf16_ms = alone.bf16_ms + shared_ms
    if found.recipes and ran_ms < bf16_ms:
        bf16_ms, alone = ran_ms, replace(alone, bf16="BF16")

    def whole(speedup: float) -> float:
        return bf16_ms / (alone.bf16_ms / speedup + shared_ms)

    parts = replace(alone, bf16_ms=bf16_ms)
    now, compiled = bf16_ms / ran_ms, whole(found.compiled)
    profile = facts.observed.breakdown if recorded(facts.observed, "breakdown.families_ms") else None
    if found.recipes:
        recipes = {name: whole(each) for name, each in found.recipes.items()}
        fp8 = {"as_is": compiled, "recipes": recipes, "bf16_now": now}
    elif found.as_is is None:
        fp8 = {}
    else:
        fp8 = {"as_is": now, "modelled_ms": bf16_ms / whole(found.as_is), "exposed_ms": exposed_ms}
        parts = _as_profiled(parts, profile, late) if profile else parts
        known_ms = parts.bf16_ms - parts.saved_ms + parts.casts_ms + parts.idle_ms
        parts = replace(parts, other_ms=ran_ms - known_ms)
        compiled = compiled if found.gains_compiled else now
    idle_ms = profile.get("idle_ms", 0.0) if profile else 0.0
    return replace(found, compiled=compiled, parts=parts, ran_ms=ran_ms, ran_idle_ms=idle_ms, **fp8)


def _as_profiled(parts: ModelledParts, profile: Breakdown, late: float) -> ModelledParts:
    """Take the matmuls, casts and idle time of FP8 from the profiled step."""
    took = {family: profile.get("scale", 1.0) * ms for family, ms in profile.families_ms.items()}
    return replace(
        parts,
        saved_ms=parts.bf16_gemms_ms - sum(took.get(family, 0.0) for family in GEMMS),
        casts_ms=took.get("cast", 0.0),
        idle_ms=max(0.0, profile.get("idle_ms", 0.0) - late - parts.bf16_idle_ms),
    )


def watched_ms(facts: Facts) -> float | None:
    """Return the step of a watched script, in ms, if the model is of the GPU that ran it."""
    watched = facts.get("observed.clock") == "cuda" and facts.observed.steps_ms
    if not watched or facts.get("assumed_gpu") or micro_batches(facts) > 1:
        return None
    return median(facts.observed.steps_ms)
