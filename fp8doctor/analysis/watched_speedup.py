"""The modelled BF16 step compared with the step that a script was watched in."""

from __future__ import annotations

from statistics import median

from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import ModelledSpeedup, gemms_ms
from fp8doctor.analysis.rank_comparison import exposed_of_ranks, late_ms
from fp8doctor.cost.matmul_counts import micro_batches
from fp8doctor.facts import Facts, if_recorded, recorded


def beside_its_run(found: ModelledSpeedup, facts: Facts) -> ModelledSpeedup:
    """Compare the modelled BF16 step with the watched step, if there is one, instead of the modelled one.

    Communication and the wait for a late rank are in every step.
    """
    ran_ms = watched_ms(facts)
    if ran_ms is None:
        return found
    exposed_ms = min(if_recorded(exposed_of_ranks, facts) or (0.0,))
    late = if_recorded(late_ms, facts) or 0.0
    shared_ms = min(ran_ms, exposed_ms + late)
    profile = facts.observed.breakdown if recorded(facts.observed, "breakdown.families_ms") else None
    idle_ms = profile.get("idle_ms", 0.0) if profile else 0.0
    parts_ms = found.parts_ms | {"idle": 0.0}
    beside = replace(found, ran_ms=ran_ms, shared_ms=shared_ms, ran_idle_ms=idle_ms, parts_ms=parts_ms)
    bf16_ms = beside.bf16_ms

    def whole(speedup: float) -> float:
        return bf16_ms / (found.bf16.step_ms / speedup + shared_ms)

    now, compiled = bf16_ms / ran_ms, whole(found.compiled)
    if found.recipes:
        recipes = {name: whole(each) for name, each in found.recipes.items()}
        return replace(beside, compiled=compiled, as_is=compiled, recipes=recipes, bf16_now=now)
    if found.as_is is None:
        return replace(beside, compiled=compiled)
    if profile:
        took = {family: profile.get("scale", 1.0) * ms for family, ms in profile.families_ms.items()}
        parts_ms = {
            "GEMMs": gemms_ms(took) - gemms_ms(found.bf16.families_ms),
            "casts": took.get("cast", 0.0),
            "idle": max(0.0, idle_ms - late - found.bf16.idle_ms),
        }
    return replace(
        beside,
        compiled=compiled if found.best - found.as_is >= MORE else now,
        as_is=now,
        parts_ms=parts_ms,
        modelled_ms=bf16_ms / whole(found.as_is),
        exposed_ms=exposed_ms,
    )


MORE = 0.01
"""Speedup that compiling everything gives beyond the step as it is, from which it counts. A choice."""


def watched_ms(facts: Facts) -> float | None:
    """Return the step of a watched script, in ms, if the model is of the GPU that ran it."""
    watched = facts.get("observed.clock") == "cuda" and facts.observed.steps_ms
    if not watched or facts.get("assumed_gpu") or micro_batches(facts) > 1:
        return None
    return median(facts.observed.steps_ms)
