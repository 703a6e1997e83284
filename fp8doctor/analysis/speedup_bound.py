"""The bound on FP8: the best BF16 step with FP8's matmul times, and free casts.

No change of the casts can beat it, so it says when there is little to look for. It rests on FP8 matmuls that
were timed, in a step or alone. They have to be all that FP8 could take, with one scale for a whole tensor,
which gives the fastest matmuls. With another recipe, or with a layer left out, they would bound only the job
as it is. Then the bound rests on the datasheet, and is called modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from fp8doctor.analysis.layers import would_be_converted
from fp8doctor.analysis.step_difference import breakdown_of, part_ms
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16, traits
from fp8doctor.cost import linear_cost, micro_batches, modelled_gpu, products_of, rows_of
from fp8doctor.facts import Arm, Breakdown, Facts, recorded
from fp8doctor.finding import Basis
from fp8doctor.recipes import named


class Ceiling(Struct, frozen=True):
    """An upper bound on the speedup over the best BF16."""

    speedup: float
    basis: Basis
    source: str
    """Source of the FP8 matmuls' time, in words."""
    gemms_ms: float
    """Matmuls of the BF16 step."""
    fp8_gemms_ms: float
    """Their time in FP8, those that lose left in BF16."""
    step_ms: float
    """The BF16 step."""
    in_step_ms: float | None = None
    """The fastest matmuls of an FP8 step that was profiled, whatever its recipe and layers."""

    @property
    def of_the_job(self) -> float | None:
        """Bound FP8 with the layers and recipe of the job; None if they make its matmuls no faster.

        What the datasheet allows gives way to an FP8 step that was profiled.
        """
        if self.in_step_ms is None:
            return self.speedup
        if self.in_step_ms >= self.gemms_ms:
            return None
        measured = self.step_ms / (self.step_ms - self.gemms_ms + self.in_step_ms)
        return measured if self.basis == "modelled" else self.speedup


def bound(facts: Facts, bf16: Arm, fp8: Iterable[Arm]) -> Ceiling | None:
    """Bound the speedup of a job whose best BF16 is ``bf16``.

    ``fp8`` are variants that do the same work in FP8. The least measured time counts, because it is a bound.
    None if the BF16 step was not profiled, or the whole model's FP8 matmuls are unknown. A profiled step is
    never above the bound, whatever its recipe.
    """
    step = breakdown_of(bf16) if recorded(bf16, "breakdown") else None
    if step is None or not bf16.step_ms:
        return None
    gemms = part_ms(step, "GEMMs")
    arms = list(fp8)
    measured = [each for each in (_in_a_step(_whole(facts, arms)), _alone(facts, gemms)) if each]
    known = min(measured, key=lambda each: each[1], default=None) or _by_datasheet(facts, gemms)
    if known is None:
        return None
    basis: Basis = "measured" if measured else "modelled"
    reached = _in_a_step(arms)
    fastest = min(known[1], gemms, *([reached[1]] if reached else ()))
    speedup, in_step_ms = bf16.step_ms / (bf16.step_ms - gemms + fastest), _least_in_a_step(arms)
    return Ceiling(speedup, basis, known[0], gemms, fastest, bf16.step_ms, in_step_ms)


def _whole(facts: Facts, arms: Iterable[Arm]) -> list[Arm]:
    """List the variants with all possible layers in FP8, with one scale per tensor."""
    if _left_out(facts):
        return []
    return [each for each in arms if _is_whole(each, _per_tensor(facts))]


def _per_tensor(facts: Facts) -> bool:
    """Return whether every FP8 layer, as it is, has one scale per tensor."""
    return all(
        named(linear.recipe).granularity == "tensor"
        for linear in facts.network.linears
        if linear.use == "training"
    )


def _is_whole(arm: Arm, as_is: bool) -> bool:
    """Return whether the variant is whole.

    ``as_is`` answers for a variant that changes neither recipes nor which layers are in FP8.
    """
    changes = arm.get("treatments", ())
    recipes = [recipe for each in changes if (recipe := traits(each).recipe)]
    if KEEP_IN_BF16 in changes:
        return False
    return all(named(recipe).granularity == "tensor" for recipe in recipes) if recipes else as_is


def _left_out(facts: Facts) -> bool:
    """Return whether a possible layer is neither in FP8 nor converted by the trial.

    Heads, routers and adapters are usually left out.
    """
    none = not any(linear.use == "training" for linear in facts.network.linears)
    return any(
        would_be_converted(linear, roles=("body", "experts"), rewritten=True)
        and not (none and would_be_converted(linear))
        for linear in facts.network.linears
    )


def _in_a_step(arms: Iterable[Arm]) -> tuple[str, float] | None:
    """Sum up all matmuls of the fastest FP8 step that was profiled."""
    profiled = list(_profiled(arms))
    if not profiled:
        return None
    _, name, fastest = min(profiled, key=lambda each: each[0])
    return f"the matmuls of the variant {name}", part_ms(fastest, "GEMMs")


def _least_in_a_step(arms: Iterable[Arm]) -> float | None:
    return min((part_ms(step, "GEMMs") for _, _, step in _profiled(arms)), default=None)


def _profiled(arms: Iterable[Arm]) -> Iterator[tuple[float, str, Breakdown]]:
    for arm in arms:
        found = breakdown_of(arm) if recorded(arm, "breakdown") else None
        if found is not None and arm.step_ms and found.families_ms.get("gemm_fp8"):
            yield arm.step_ms, arm.name, found


def _alone(facts: Facts, gemms_ms: float) -> tuple[str, float] | None:
    """Speed up the step's matmuls of Linears as timed alone; the others stay.

    Others are a head left out of FP8, the products of eager attention, adapters, and fp32 matmuls.
    """
    shapes = facts.get("trial.shapes", ())
    bf16 = sum(len(each.layers) * each.bf16_ms for each in shapes)
    if not bf16 or all(each.fp8_ms is None for each in shapes) or _left_out(facts) or not _per_tensor(facts):
        return None
    best = sum(
        len(each.layers) * min(each.bf16_ms, each.fp8_ms if each.fp8_ms is not None else each.bf16_ms)
        for each in shapes
    )
    theirs = min(gemms_ms, bf16 * micro_batches(facts))
    return "the matmuls of every shape timed alone", gemms_ms - theirs * (1 - best / bf16)


def _by_datasheet(facts: Facts, gemms_ms: float) -> tuple[str, float] | None:
    """Speed up the step's matmuls as the cost model does those of the Linears."""
    gpu = modelled_gpu(facts)
    if gpu is None or not recorded(facts, "network"):
        return None
    bf16 = best = 0.0
    for linear in facts.network.linears:
        rows = rows_of(linear, facts) or facts.workload.tokens
        count = products_of(linear, facts)
        cost = linear_cost(linear, rows, gpu, own_recipe=False) if rows else None
        if cost is None:
            return None
        bf16 += count * cost.bf16_ms
        best += count * (cost.bf16_ms if linear.adapter == "adapter" else min(cost))
    return (f"the datasheet of {gpu.name}", gemms_ms * best / bf16) if bf16 else None
