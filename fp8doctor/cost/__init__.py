"""Estimates of FP8's cost and gain, from datasheets and an H200's efficiencies, which other GPUs get.

Lengths count elements, times are in ms. research/benchmarks/cost_model.py has the error.
Checks read these names as ``kit.cost``.
"""

from fp8doctor.cost.layer import mxfp8_experts
from fp8doctor.cost.matmuls import (
    PADDED,
    amdahl,
    is_grouped,
    large_gemm_speedup,
    micro_batches,
    routed_rows,
    rows_seen,
)
from fp8doctor.cost.step_cost import with_linears_compiled
from fp8doctor.gpus import modelled_gpu
