"""The CUDA compute capability of a GPU, and from which on there are tensor cores for what."""

from __future__ import annotations

from fp8doctor.cost import gpu_spec
from fp8doctor.facts import Facts, Gpu, recorded

FIRST_WITH_FP8 = (8, 9)
"""Ada. Source: ``_scaled_mm_allowed_device`` in torch. Accelerate falls back to fp16 below it, by itself:
``check_cuda_fp8_capability`` in accelerate 1.15."""

FIRST_WITH_BF16 = (8, 0)
"""Ampere. Source: Ampere tuning guide."""


def capability(gpu: Gpu) -> tuple[int, ...]:
    """Read the compute capability as numbers; 0.0 where there is none."""
    return tuple(int(part) for part in (gpu.compute_capability or "0.0").split(".") if part.isdigit())


def assumed_gpus(facts: Facts) -> list[Gpu]:
    """The GPU that --assume-gpu names, for a job that sees none."""
    if not recorded(facts, "assumed_gpu") or not facts.assumed_gpu:
        return []
    spec = gpu_spec(facts.assumed_gpu)
    return [Gpu(name=spec.name, vendor="nvidia", compute_capability=spec.compute_capability)]
