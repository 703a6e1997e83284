"""Cost of uncompiled casts, and the saving of compiling their layers, modelled."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from fp8doctor.cost.cast_cost import MOST_ROWS_CAST_EAGERLY, casts_ms
from fp8doctor.cost.layer import HOST_MS, between_ms, linear_cost, uncompiled
from fp8doctor.cost.matmul_counts import calls_of, gemms, micro_batches, rows_of
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.finding import Saving
from fp8doctor.gpus import modelled_gpu
from fp8doctor.recipes import named, recipe_of, stack_of

UNCERTAINTY = 0.25
"""Half-width of the interval around a modelled saving. Of 12 measured savings of 32 to 621 ms 11 lie inside
it; one with adapters in FP32 saves 6% more. One H200, research/benchmarks/measured/h200_steps.json.gz."""


class Balance(Struct, frozen=True):
    """Cost and gain of FP8 in one step of these layers, uncompiled, modelled."""

    casts_ms: float
    """Time of the GPU."""
    gemms_saved_ms: float
    gpu: str
    host_ms: float
    """Time of the host for launching the casts meanwhile."""
    saving: Saving
    """What compiling the layers and the work between them saves. The uncompiled casts keep the GPU busy, or,
    with few tokens, the host: the longer of the two counts."""


def eager_balance(facts: Facts, eager: Iterable[Linear]) -> Balance | None:
    """Weigh these layers' uncompiled casts against their matmuls' saving.

    None if tokens or GPU are unknown, the tokens are too many, or FP8 cannot run.
    """
    gpu = modelled_gpu(facts)
    if gpu is None:
        return None
    casts = host = saved = busy_saved = host_saved = 0.0
    for linear in eager:
        rows = rows_of(linear, facts)
        cost = linear_cost(linear, rows, gpu) if rows else None
        if not rows or rows > MOST_ROWS_CAST_EAGERLY or cost is None:
            return None
        count = micro_batches(facts) * gemms(linear) * calls_of(linear, facts)
        shape = (rows, linear.in_features, linear.out_features)
        stack, known = stack_of(linear), recipe_of(linear) if recorded(linear, "recipe") else None
        recipe = known if known and known.cast_bytes and not known.only_compiled else named("tensorwise")
        now, then = (casts_ms(*shape, gpu, compiled=each, recipe=recipe) for each in (False, True))
        beside, fused = (between_ms(linear, rows, gpu, how) for how in (uncompiled(facts), "compiled"))
        casts += count * now
        saved += count * cost.saved_ms
        busy_saved += count * (now - then + beside - fused)
        host += count * stack.eager.host_ms
        launched = stack.eager.host_ms - stack.compiled.host_ms
        host_saved += count * (launched + HOST_MS["eager"] - HOST_MS["compiled"])
    most = max(busy_saved, host_saved)
    return Balance(casts, saved, gpu.name, host, modelled_saving(most, gpu.name))


def modelled_saving(ms: float, gpu: str) -> Saving:
    return Saving(low=ms * (1 - UNCERTAINTY), high=ms * (1 + UNCERTAINTY), basis="modelled", gpu=gpu)
