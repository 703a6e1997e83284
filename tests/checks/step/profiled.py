"""Arms with a breakdown, composed in the proportions that one H200 measured (torch 2.11, torchao 0.18): no
real object.

The largest kernels of each step were summed by family there, per step; what was left of its busy time is
spread over the families that were not.
"""

from typing import Any

from msgspec.structs import replace

from fp8doctor import kit
from fp8doctor.facts import Arm, Breakdown
from tests.checks.arms import ran


def breakdown(step_ms: float, *, host_wait_pct: float | None = 5.0, **families: float) -> Breakdown:
    """A reliable breakdown of a step whose time in none of the families is idle."""
    idle_ms, read = step_ms - sum(families.values()), {"scale": 1.0, "unclassified_pct": 0.0, "groups": ()}
    made = kit.profiled("", families, idle_ms, host_wait_pct=host_wait_pct, **read)
    return made.breakdown


def profiled(
    name: str, step_ms: float, *, arm: dict[str, Any] | None = None, **families: float | None
) -> Arm:
    """An arm that was timed and profiled."""
    return ran(name, step_ms, breakdown=breakdown(step_ms, **families), **(arm or {}))  # type: ignore[arg-type]


def replaced(arm: Arm, **fields: Any) -> Arm:
    """The arm with other values in its breakdown."""
    assert arm.breakdown is not None
    return replace(arm, breakdown=replace(arm.breakdown, **fields))


COMPILED: dict[str, Any] = {"base": "as_is", "treatments": ("compile-blocks",), "graphs_run": 24}

FAMILIES = ("gemm_16bit", "attention", "optimizer", "pointwise", "norm", "loss", "gemm_fp8", "cast")
BF16_MS = (62.4, 11.1, 2.5, 9.4, 3.0, 3.0)
FP8_EAGER_MS = (4.2, 10.4, 2.5, 29.0, 4.9, 3.0, 25.2, 273.6)
FP8_COMPILED_MS = (4.2, 10.1, 2.4, 6.5, 3.2, 3.0, 32.1, 23.7)

BF16 = profiled("bf16_compiled", 92.7, **dict(zip(FAMILIES, BF16_MS, strict=False)))
FP8_EAGER = profiled("as_is", 366.1, **dict(zip(FAMILIES, FP8_EAGER_MS, strict=True)))
FP8_COMPILED = profiled("prescribed", 88.3, arm=COMPILED, **dict(zip(FAMILIES, FP8_COMPILED_MS, strict=True)))
"""The 468 M decoder, 16,384 tokens. Uncompiled the GPU is 96% busy, with casts."""
