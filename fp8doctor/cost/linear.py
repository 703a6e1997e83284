"""The matmuls of one layer of the model, in BF16 and in FP8."""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.cost.gemm import step_gemms_ms
from fp8doctor.facts import Linear
from fp8doctor.gpus import GpuSpec


class LinearCost(NamedTuple):
    """Time of all matmuls of a layer in one step, in ms, without casts."""

    bf16_ms: float
    fp8_ms: float

    @property
    def saved_ms(self) -> float:
        return self.bf16_ms - self.fp8_ms


def linear_cost(linear: Linear, rows: int, gpu: GpuSpec, *, own_recipe: bool = True) -> LinearCost | None:
    """Model one layer with these rows; None if the GPU has no FP8 tensor cores.

    Without ``own_recipe`` all its matmuls are in FP8, whatever its recipe leaves in BF16.
    """
    shape = (rows, linear.in_features, linear.out_features)
    trained = linear.requires_grad is not False
    recipe = linear.get("recipe") if own_recipe else None
    bf16 = step_gemms_ms(*shape, gpu, fp8=False, weight_gradient=trained)
    fp8 = step_gemms_ms(*shape, gpu, fp8=True, weight_gradient=trained, recipe=recipe)
    return None if bf16 is None or fp8 is None else LinearCost(bf16, fp8)
