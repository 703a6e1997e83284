"""How far estimated speedups may be off, by stack, recipe and GPU."""

from __future__ import annotations

from fp8doctor.analysis.modelled_speedup import OFF, OFF_FUSED
from fp8doctor.gpus import GpuSpec
from fp8doctor.recipes import Recipe


def margin(recipe: Recipe, gpu: GpuSpec, *, compiled: bool) -> float:
    """Return the share by which the estimate may be off."""
    return OFF_FUSED if recipe.granularity == "tensor" and compiled else OFF


def gpu_class(gpu: GpuSpec) -> str:
    """Name the group of GPUs whose published speedups a range rests on."""
    return {"8": "Ada", "9": "Hopper", "10": "Blackwell"}.get(gpu.compute_capability.partition(".")[0], "RTX")
