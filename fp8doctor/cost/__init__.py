"""Estimates of FP8's cost and gain, from datasheets and an H200's efficiencies, which other GPUs get.

Lengths count elements, times are in ms. research/benchmarks/cost_model.py has the error."""

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
