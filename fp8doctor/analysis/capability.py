"""The CUDA compute capability of a GPU, and from which on there are tensor cores for what."""

from __future__ import annotations

from fp8doctor.cost import gpu_spec
from fp8doctor.facts import Facts, Gpu, recorded

FIRST_WITH_FP8 = (8, 9)
"""Ada. Source: ``_scaled_mm_allowed_device`` in torch. Accelerate falls back to fp16 below it, by itself:
``check_cuda_fp8_capability`` in accelerate 1.15."""

FIRST_WITH_BF16 = (8, 0)
"""Ampere. Source: Ampere tuning guide."""


AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx120", "gfx125")
"""Beginnings of the AMD architectures with FP8 matrix cores: CDNA 3 (fnuz types), CDNA 4, RDNA 4, gfx1250.
Source: ``scaled_mm_arch_allowed`` of torch main, which takes gfx1250 from ROCm 7.14 on."""


def has_fp8(gpu: Gpu) -> bool:
    """Whether a GPU has FP8 tensor cores, or matrix cores."""
    if gpu.vendor == "amd":
        return (gpu.architecture or "").startswith(AMD_WITH_FP8)
    return capability(gpu) >= FIRST_WITH_FP8


def capability(gpu: Gpu) -> tuple[int, ...]:
    """Read the compute capability as numbers; 0.0 where there is none."""
    return tuple(int(part) for part in (gpu.compute_capability or "0.0").split(".") if part.isdigit())


def assumed_gpus(facts: Facts) -> list[Gpu]:
    """The GPU that --assume-gpu names, for a job that sees none."""
    if not recorded(facts, "assumed_gpu") or not facts.assumed_gpu:
        return []
    spec = gpu_spec(facts.assumed_gpu)
    return [Gpu(name=spec.name, vendor="nvidia", compute_capability=spec.compute_capability)]
