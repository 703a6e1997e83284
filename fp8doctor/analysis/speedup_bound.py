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
    of_the_job: float | None
    """With the layers and recipe of the job; None if they make its matmuls no faster.

    What the datasheet allows gives way to an FP8 step that was profiled.
    """


def bound(facts: Facts, bf16: Arm, fp8: Iterable[Arm]) -> Ceiling | None:
    """Bound the speedup of a job whose best BF16 is ``bf16``.

    ``fp8`` are variants that do the same work in FP8. The least measured time counts, because it is a bound.
    None if the BF16 step was not profiled, or the whole model's FP8 matmuls are unknown. A profiled step is
    never above the bound, whatever its recipe.
    """
    step = breakdown_of(bf16) if recorded(bf16, "breakdown") else None
    if step is None or not bf16.step_ms:
        return None
    gemms, arms, step_ms = part_ms(step, "GEMMs"), list(fp8), bf16.step_ms

    def speedup(fp8_gemms_ms: float) -> float:
        return step_ms / (step_ms - gemms + fp8_gemms_ms)

    seen = (_in_a_step(_whole(facts, arms)), _alone(facts, gemms))
    measured = min((each for each in seen if each is not None), default=None)
    known = _by_datasheet(facts, gemms) if measured is None else measured
    if known is None:
        return None
    basis: Basis = "modelled" if measured is None else "measured"
    reached, least = (
        _in_a_step(arms),
        min((part_ms(each, "GEMMs") for _, each in _profiled(arms)), default=None),
    )
    most = speedup(min(known, gemms, gemms if reached is None else reached))
    if least is None:
        return Ceiling(most, basis, most)
    own = None if least >= gemms else speedup(least) if basis == "modelled" else most
    return Ceiling(most, basis, own)


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


def _in_a_step(arms: Iterable[Arm]) -> float | None:
    """Sum up all matmuls of the fastest FP8 step that was profiled, in ms."""
    fastest = min(_profiled(arms), key=lambda each: each[0], default=None)
    return part_ms(fastest[1], "GEMMs") if fastest else None


def _profiled(arms: Iterable[Arm]) -> Iterator[tuple[float, Breakdown]]:
    for arm in arms:
        found = breakdown_of(arm) if recorded(arm, "breakdown") else None
        if found is not None and arm.step_ms and found.families_ms.get("gemm_fp8"):
            yield arm.step_ms, found


def _alone(facts: Facts, gemms_ms: float) -> float | None:
    """Speed up the step's matmuls of Linears as timed alone; the others stay.

    Others are a head left out of FP8, the products of eager attention, adapters, and fp32 matmuls.
    """
    shapes = facts.get("trial.shapes", ())
    bf16: float = sum(len(each.layers) * each.bf16_ms for each in shapes)
    if not bf16 or all(each.fp8_ms is None for each in shapes) or _left_out(facts) or not _per_tensor(facts):
        return None
    best: float = sum(
        len(each.layers) * min(each.bf16_ms, each.fp8_ms if each.fp8_ms is not None else each.bf16_ms)
        for each in shapes
    )
    theirs = min(gemms_ms, bf16 * micro_batches(facts))
    return gemms_ms - theirs * (1 - best / bf16)


def _by_datasheet(facts: Facts, gemms_ms: float) -> float | None:
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
        best += count * (cost.bf16_ms if linear.adapter == "adapter" else min(cost.bf16_ms, cost.fp8_ms))
    return gemms_ms * best / bf16 if bf16 else None
