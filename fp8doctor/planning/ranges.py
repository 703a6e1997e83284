"""How far estimated speedups may be off, by stack, scaling and GPU."""

from __future__ import annotations

from fp8doctor.analysis import modelled_speedup
from fp8doctor.gpus import GpuSpec
from fp8doctor.recipes import Recipe

UNCHECKED = 0.25
"""Share for what was compared with nothing. A convention."""

OFF = {
    ("torchao", "tensor", "Hopper"): 0.12,
    ("torchao", "row", "Hopper"): 0.15,
    ("transformer_engine", "tensor", "Hopper"): 0.11,
    ("transformer_engine", "block", "Hopper"): 0.15,
    ("transformer_engine", "tensor", "Blackwell"): 0.16,
    ("transformer_engine", "tensor", "Ada"): 0.15,
}
"""Stack, elements of a scale, GPUs -> share that a compiled estimate may be off.

Hopper: nothing that was published or recorded is further off, but for jobs whose attention is of 2023
(research/benchmarks/results/published.md and cost_model_h200.md). Blackwell and Ada have jobs of one source
each, which are 5% off at the most: three times that."""


def margin(recipe: Recipe, gpu: GpuSpec, *, compiled: bool, in_balance: bool) -> float:
    """Return the share by which the estimate may be off.

    What is not compiled, or waits for the host, is as far off as in other estimates.
    """
    least = modelled_speedup.OFF_IN_BALANCE if in_balance else 0.0 if compiled else modelled_speedup.OFF
    return max(least, OFF.get((recipe.stack, recipe.granularity, gpu_class(gpu)), UNCHECKED))


def gpu_class(gpu: GpuSpec) -> str:
    """Name the group of GPUs whose published speedups a range rests on."""
    return {"8": "Ada", "9": "Hopper", "10": "Blackwell"}.get(gpu.compute_capability.partition(".")[0], "RTX")
