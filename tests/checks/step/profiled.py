"""Arms with a breakdown, composed in the proportions that one H200 measured (torch 2.11, torchao 0.18): no
real object.

The largest kernels of each step were summed by family there, per step; what was left of its busy time is
spread over the families that were not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fp8doctor.facts import Arm, Breakdown
from tests.checks.arms import ran


def breakdown(step_ms: float, *, host_wait_pct: float | None = 5.0, **families: float) -> Breakdown:
    """A reliable breakdown of a step whose time in none of the families is idle."""
    busy = sum(families.values())
    return Breakdown(
        families_ms=families,
        idle_ms=step_ms - busy,
        host_wait_pct=host_wait_pct,
        busy_ms=busy,
        scale=1.0,
        reliable=True,
        kernels=2000,
        unclassified_pct=0.0,
        groups=(),
        modules=(),
    )


def profiled(
    name: str,
    step_ms: float,
    *,
    host_wait_pct: float | None = 5.0,
    arm: dict[str, Any] | None = None,
    **families: float,
) -> Arm:
    """An arm that was timed and profiled."""
    return ran(
        name, step_ms, breakdown=breakdown(step_ms, host_wait_pct=host_wait_pct, **families), **(arm or {})
    )


def replaced(arm: Arm, **fields: Any) -> Arm:
    """The arm with other values in its breakdown."""
    assert arm.breakdown is not None
    return msgspec.structs.replace(arm, breakdown=msgspec.structs.replace(arm.breakdown, **fields))


def unprofiled(name: str, step_ms: float, **fields: Any) -> Arm:
    """An arm that was timed only."""
    return ran(name, step_ms, breakdown=None, **fields)


BF16 = profiled(
    "bf16_compiled", 92.7, gemm_16bit=62.4, attention=11.1, optimizer=2.5, pointwise=9.4, norm=3.0, loss=3.0
)
FP8_EAGER = profiled(
    "as_is",
    366.1,
    gemm_fp8=25.2,
    gemm_16bit=4.2,
    cast=273.6,
    attention=10.4,
    optimizer=2.5,
    pointwise=29.0,
    norm=4.9,
    loss=3.0,
)
COMPILED: dict[str, Any] = {"base": "as_is", "treatments": ("compile-blocks",), "graphs_run": 24}
FP8_COMPILED = profiled(
    "prescribed",
    88.3,
    arm=COMPILED,
    gemm_fp8=32.1,
    gemm_16bit=4.2,
    cast=23.7,
    attention=10.1,
    optimizer=2.4,
    pointwise=6.5,
    norm=3.2,
    loss=3.0,
)
"""The 468 M decoder, 16,384 tokens. Uncompiled the GPU is 96% busy, with casts."""
