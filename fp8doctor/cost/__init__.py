"""Estimates of FP8's cost and gain, from datasheets and measurements on an H200.

The model has a time for every matmul by its shape, the bytes that casts move, and Amdahl's law;
`fp8doctor.cost.step_cost` adds up a training step. Its numbers have the basis ``modelled`` and a GPU name.
Lengths count elements, times are in ms. Other GPUs get the H200's efficiencies. Its error:
research/benchmarks/cost_model.py.
"""

from fp8doctor.cost.gemm import amdahl, gemm_ms, large_gemm_speedup, step_gemms_ms
from fp8doctor.cost.layer import linear_cost, mxfp8_experts
from fp8doctor.cost.matmul_counts import (
    calls_of,
    gemms,
    micro_batches,
    products_of,
    routed_rows,
    rows_of,
    rows_seen,
    step_tokens,
)
from fp8doctor.cost.step_cost import eager_balance
from fp8doctor.gpus import GPUS, GpuSpec, gpu_spec, modelled_gpu

__all__ = [
    "GPUS",
    "GpuSpec",
    "amdahl",
    "calls_of",
    "eager_balance",
    "gemm_ms",
    "gemms",
    "gpu_spec",
    "large_gemm_speedup",
    "linear_cost",
    "micro_batches",
    "modelled_gpu",
    "mxfp8_experts",
    "products_of",
    "routed_rows",
    "rows_of",
    "rows_seen",
    "step_gemms_ms",
    "step_tokens",
]
