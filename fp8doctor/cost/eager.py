"""Cost of uncompiled casts, and the saving of compiling their layers, modelled."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from fp8doctor.cost.cast_cost import MOST_ROWS_CAST_EAGERLY, casts_ms
from fp8doctor.cost.gemm import linear_cost
from fp8doctor.cost.matmul_counts import calls_of, gemms, micro_batches, rows_of
from fp8doctor.cost.step_cost import HOST_MS, between_ms, uncompiled
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.finding import Saving
from fp8doctor.gpus import modelled_gpu
from fp8doctor.recipes import Recipe, named, recipe_of, stack_of

UNCERTAINTY = 0.25
"""Half-width of the interval around a modelled saving. Of 12 measured savings of 32 to 621 ms 11 lie inside
it; one with adapters in FP32 saves 6% more. One H200, research/benchmarks/measured/h200_steps.json.gz."""


class Balance(Struct, frozen=True):
    """Cost and gain of FP8 in one step of these layers, uncompiled, modelled."""

    casts_ms: float
    """Time of the GPU."""
    gemms_saved_ms: float
    gpu: str
    host_ms: float = 0.0
    """Time of the host for launching the casts meanwhile."""


def eager_balance(facts: Facts, eager: Iterable[Linear]) -> Balance | None:
    """Weigh these layers' uncompiled casts against their matmuls' saving, if known."""
    gpu = modelled_gpu(facts)
    if gpu is None:
        return None
    casts = host = saved = 0.0
    for linear in eager:
        rows = rows_of(linear, facts)
        cost = linear_cost(linear, rows, gpu) if rows else None
        if not rows or rows > MOST_ROWS_CAST_EAGERLY or cost is None:
            return None
        count = gemms(linear) * calls_of(linear, facts)
        shape = (rows, linear.in_features, linear.out_features)
        casts += count * casts_ms(*shape, gpu, compiled=False, recipe=_measured(linear))
        host += count * stack_of(linear).eager.host_ms
        saved += count * cost.saved_ms
    times = micro_batches(facts)
    return Balance(casts * times, saved * times, gpu.name, host * times)


def eager_cast_saving(facts: Facts, eager: Iterable[Linear]) -> Saving | None:
    """Model the saving of compiling these layers and the work between them, per step.

    The uncompiled casts keep the GPU busy, or, with few tokens, the host: the longer of the two counts. None
    if tokens or GPU are unknown, the tokens are too many, or FP8 cannot run.
    """
    gpu = modelled_gpu(facts)
    if gpu is None or gpu.fp8_tflops is None:
        return None
    how = uncompiled(facts)
    busy = host = 0.0
    for linear in eager:
        rows = rows_of(linear, facts)
        if not rows or rows > MOST_ROWS_CAST_EAGERLY:
            return None
        count = gemms(linear) * calls_of(linear, facts)
        shape = (rows, linear.in_features, linear.out_features)
        recipe, stack = _measured(linear), stack_of(linear)
        busy += count * (
            casts_ms(*shape, gpu, compiled=False, recipe=recipe)
            - casts_ms(*shape, gpu, compiled=True, recipe=recipe)
        )
        busy += count * (between_ms(linear, rows, gpu, how) - between_ms(linear, rows, gpu, "compiled"))
        host += count * (
            stack.eager.host_ms - stack.compiled.host_ms + HOST_MS["eager"] - HOST_MS["compiled"]
        )
    saved = max(busy, host) * micro_batches(facts)
    return Saving(
        low=saved * (1 - UNCERTAINTY), high=saved * (1 + UNCERTAINTY), basis="modelled", gpu=gpu.name
    )


def _measured(linear: Linear) -> Recipe:
    """Look up the layer's recipe, or tensorwise if its casts were not measured."""
    found = recipe_of(linear) if recorded(linear, "recipe") else None
    return found if found and found.cast_bytes and not found.only_compiled else named("tensorwise")
