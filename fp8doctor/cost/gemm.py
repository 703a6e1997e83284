"""The time of one GEMM by its shape: tiles in waves over the multiprocessors, or the bytes of its operands.

A GEMM is cut into tiles; each wave gives every multiprocessor one, so a last wave that is nearly empty costs as much as a
full one, and few tiles leave multiprocessors idle unless the reduction is split. A short K does not hide what starting and
ending a tile takes. cuBLAS chooses by rules of its own; the best of a few tiles is close enough.

The constants are those that `tests/benchmarks/calibrate_cost.py` derives again from a recorded sweep.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from fp8doctor.cost.gpus import GpuSpec, memory_ms

GEMM_EFFICIENCY_BF16 = 0.82
"""Share of the peak rate in full waves of a large BF16 GEMM: 2.76-2.80 ms at (16384, 4096, 16384) in a single step, one
H200, torch 2.11, November 2026."""

GEMM_EFFICIENCY_FP8 = 0.78
"""The same for FP8, e4m3 x e4m3 and e5m2 x e4m3 alike: 1.461 and 1.485 ms, same shape and H200."""

SUSTAINED = 0.88
"""Rate that is left of it when GEMM follows GEMM, at the power limit: three BF16 GEMMs of that shape take 9.77 ms back to
back and 8.35 in a single step (0.85); the 28 Linears of a decoder of width 4096 run at 0.90 (BF16) and 0.83 (FP8) of it.
Same H200, 700 W."""

TILE_MS = 0.0004
"""Start and end of a tile that the next one does not hide. Fitted to the Linears of a decoder of width 1024, K = 1024:
58.2 ms in BF16 and 32.1 in FP8, same H200."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 128, 0.7))
"""Rows, columns, and rate relative to the largest. The sizes are in the names of kernels seen on an H200
(``nvjet_sm90_tst_256x128_64x4_...``); the rates of the small ones are assumed until the sweep is recorded."""

SPLITS = (1, 2, 4, 8, 16)
"""Parts of the reduction that run beside each other (``splitK`` in the kernel names)."""

SHORTEST_SPLIT = 1024
"""Least K of one part. Assumed."""

MULTIPLE = 8
"""Elements: rows of BF16 matrices whose lengths are no multiple of it are not aligned to 16 bytes."""

UNALIGNED = 0.2
"""Rate with such rows: a decoder whose head has 50257 outputs takes 130 ms a step where 103 would be expected; same H200."""

KERNEL_LAUNCH_MS = 0.002
"""Shortest time of a kernel that waits for its launch. Source: torchao ``roofline_utils.KERNEL_LAUNCH_OVERHEAD_SEC``."""

LARGE = (16384, 4096, 16384)
"""(M, K, N) at which FP8 is near its best: 1.88x per GEMM on one H200."""


@lru_cache(maxsize=4096)
def gemm_ms(m: int, k: int, n: int, gpu: GpuSpec, *, fp8: bool) -> float | None:
    """Time of one (M, K) x (K, N) GEMM with BF16 output: the slower of computing, moving the operands, and a launch.

    None where the GPU has no FP8 tensor cores and ``fp8`` is asked for.
    """
    if fp8 and gpu.fp8_tflops is None:
        return None
    peak = gpu.fp8_tflops * GEMM_EFFICIENCY_FP8 if fp8 and gpu.fp8_tflops else gpu.bf16_tflops * GEMM_EFFICIENCY_BF16
    aligned = 1.0 if not (m % MULTIPLE or k % MULTIPLE or n % MULTIPLE) else UNALIGNED
    per_multiprocessor = peak * SUSTAINED * aligned * 1e9 / gpu.multiprocessors
    compute = min(
        ceil(ceil(m / rows) * ceil(n / columns) * split / gpu.multiprocessors) * (2.0 * rows * columns * k / split / (per_multiprocessor * rate) + TILE_MS)
        + (memory_ms(8.0 * split * m * n, gpu) if split > 1 else 0.0)  # partial sums in FP32, written and read
        for rows, columns, rate in TILES
        for split in SPLITS
        if split == 1 or k >= split * SHORTEST_SPLIT
    )
    operand_bytes = 1 if fp8 else 2
    return max(compute, memory_ms(operand_bytes * (m * k + k * n) + 2 * m * n, gpu), KERNEL_LAUNCH_MS)


def step_gemms_ms(m: int, k: int, n: int, gpu: GpuSpec, *, fp8: bool, weight_gradient: bool = True, recipe: str | None = None) -> float | None:
    """Time of the GEMMs of one Linear in one step: output, input gradient and, if trained, weight gradient.

    The recipe ``rowwise_with_gw_hp`` leaves the weight gradient in BF16.
    """
    times = [gemm_ms(m, k, n, gpu, fp8=fp8), gemm_ms(m, n, k, gpu, fp8=fp8)]
    if weight_gradient:
        times.append(gemm_ms(k, m, n, gpu, fp8=fp8 and recipe != "rowwise_with_gw_hp"))
    return None if None in times else sum(time for time in times if time is not None)


def large_gemm_speedup(gpu: GpuSpec) -> float:
    """How much faster than BF16 a large FP8 GEMM is; 1 without FP8 tensor cores."""
    bf16, fp8 = (gemm_ms(*LARGE, gpu, fp8=in_fp8) for in_fp8 in (False, True))
    return bf16 / fp8 if bf16 and fp8 else 1.0
